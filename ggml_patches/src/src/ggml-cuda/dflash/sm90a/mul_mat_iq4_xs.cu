#include "launch.cuh"

namespace dflash {
namespace wgmma {

DFLASH_PRODUCTS_OF(, GGML_TYPE_IQ4_XS)

} // namespace wgmma
} // namespace dflash
