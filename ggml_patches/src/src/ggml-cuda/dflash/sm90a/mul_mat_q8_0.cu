#include "launch.cuh"

namespace dflash {
namespace wgmma {

DFLASH_PRODUCTS_OF(, GGML_TYPE_Q8_0)

} // namespace wgmma
} // namespace dflash
