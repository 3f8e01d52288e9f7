#include "launch.cuh"

namespace dflash {
namespace wgmma {

DFLASH_PRODUCTS_OF(, GGML_TYPE_Q4_K)

} // namespace wgmma
} // namespace dflash
