#pragma once

// How a library hands SPIR-V images to the SYCL run time: what a DPC++ compiler emits at the end of every translation
// unit, here for images that syclc has made. The layout is libsycl 9's (image struct version 3).

#include <cstddef>
#include <cstdint>

namespace sycl_register {

struct Entry {
    void * address;
    const char * name;
    size_t size;
    int32_t flags, reserved;
};

struct Property {
    const char * name;
    const void * value;
    uint32_t type;
    uint64_t size; // of the value; the value itself where type is 1
};

struct PropertySet {
    const char * name;
    const Property *begin, *end;
};

struct Image {
    uint16_t version;
    uint8_t kind, format;
    const char *target, *compile_options, *link_options;
    const unsigned char *begin, *end;
    const Entry *entries_begin, *entries_end;
    const PropertySet *sets_begin, *sets_end;
};

struct Images {
    uint16_t version, n;
    const Image * images;
    const void *host_begin, *host_end;
};

} // namespace sycl_register

extern "C" void __sycl_register_lib(const sycl_register::Images *);
extern "C" void __sycl_unregister_lib(const sycl_register::Images *);

namespace sycl_register {

class Registration {
  public:
    Registration(const Image * images, size_t n) : images_{1, (uint16_t) n, images, nullptr, nullptr} {
        __sycl_register_lib(&images_);
    }

    ~Registration() { __sycl_unregister_lib(&images_); }

    Registration(const Registration &) = delete;

  private:
    Images images_;
};

} // namespace sycl_register
