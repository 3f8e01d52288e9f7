// Linked into a test module, this lets ggml's SYCL backend take OpenCL's CPU device: upstream looks for a platform with
// a GPU and throws where there is none. The definition is strong, upstream's is an inline function, so the linker picks
// this one.

#include <string>

std::string
platform_of_the_cpu_device(void * device_manager) asm("_ZN4dpct7dev_mgr31get_preferred_gpu_platform_nameB5cxx11Ev");

std::string platform_of_the_cpu_device(void *) {
    return "Intel(R) OpenCL";
}
