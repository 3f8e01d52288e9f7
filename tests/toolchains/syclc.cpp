// Device half of a SYCL compile: syclc LIBSYCL_JIT OUT SOURCE [compiler option...]
//
// libsycl-jit is Intel's DPC++ front end as a library: the SYCL run time compiles source text with it. Its C entry
// point takes a translation unit to SPIR-V images and their property tables. Those become OUT.<i>.spv and OUT.reg.cpp,
// which registers the images when the library that holds it is loaded (sycl_register.h).
//
// The entry point is internal: the structs below describe release 2026.2.0 and no other (sycl_sdk.sh pins it).

#include <dlfcn.h>

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

struct String {
    const char * text;
};

template <class T> struct Array {
    T * items;
    size_t n;
};

struct Property {
    String name;
    bool is_number;
    uint32_t number;
    Array<uint8_t> bytes;
};

struct PropertySet {
    String name;
    Array<Property> properties;
};

struct Image {
    uint32_t format;
    uint64_t address_bits;
    const uint8_t * data;
    uint64_t size;
    Array<String> kernels;
    Array<PropertySet> property_sets;
};

// Returned through memory that the library fills and owns; the room behind is for members that are not read here.
struct Result {
    int32_t error;
    Array<Image> images;
    String options;
    Array<char> ir;
    String log;
    char room[256];
    Result() {}
    Result(const Result &) {} // not trivial: the calling convention must return it through memory
    ~Result() {}
};

struct SourceFile {
    const char *path, *text;
};

typedef Result (*CompileSycl)(SourceFile source, Array<const SourceFile> includes, Array<const char *> options,
                              Array<const char> cached_ir, bool save_ir, uint32_t binary_format);
static const uint32_t SPIRV = 2;

[[noreturn]] static void fail(const std::string & why) {
    std::fprintf(stderr, "syclc: %s\n", why.c_str());
    std::exit(1);
}

static std::string quoted(const char * text) {
    std::string out = "\"";
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') {
            out += '\\';
        }
        out += *text;
    }
    return out + '"';
}

static std::string read_file(const std::string & path) {
    std::ifstream in(path);
    if (!in) {
        fail("cannot read " + path);
    }
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
}

// The tables of one property set; returns its row in the image's table.
static std::string write_set(std::ostream & out, const PropertySet & set, const std::string & name) {
    std::string rows;
    for (size_t i = 0; i < set.properties.n; i++) {
        const Property & property = set.properties.items[i];
        const std::string key = quoted(property.name.text);
        if (property.is_number) {
            rows += "    {" + key + ", nullptr, 1, " + std::to_string(property.number) + "},\n";
            continue;
        }
        const std::string bytes = name + "_" + std::to_string(i);
        out << "alignas(8) static const unsigned char " << bytes << "[] = {";
        for (size_t j = 0; j < property.bytes.n; j++) {
            out << (int) property.bytes.items[j] << ",";
        }
        out << "0};\n";
        rows += "    {" + key + ", " + bytes + ", 2, " + std::to_string(property.bytes.n) + "},\n";
    }
    out << "static const Property " << name << "[] = {\n" << rows << "    {}};\n";
    return "    {" + quoted(set.name.text) + ", " + name + ", " + name + " + " + std::to_string(set.properties.n) +
           "},\n";
}

// SPIR-V file and tables of one image; returns its row in the translation unit's table.
static std::string write_image(std::ostream & out, const Image & image, const std::string & spv,
                               const std::string & name) {
    std::ofstream(spv, std::ios::binary).write((const char *) image.data, (std::streamsize) image.size);
    out << "asm(\".section .rodata\\n.balign 16\\n"
        << name << "_begin: .incbin \\\"" << spv << "\\\"\\n"
        << name << "_end:\\n.previous\\n\");\n"
        << "extern \"C\" const unsigned char " << name << "_begin[], " << name << "_end[];\n"
        << "static const Entry " << name << "_kernels[] = {\n";
    for (size_t i = 0; i < image.kernels.n; i++) {
        out << "    {nullptr, " << quoted(image.kernels.items[i].text) << ", 0, 0, 0},\n";
    }
    out << "    {}};\n";
    std::string sets;
    for (size_t i = 0; i < image.property_sets.n; i++) {
        sets += write_set(out, image.property_sets.items[i], name + "_set" + std::to_string(i));
    }
    out << "static const PropertySet " << name << "_sets[] = {\n" << sets << "    {}};\n";
    const auto range = [&](const std::string & table, size_t n) {
        return ", " + name + table + ", " + name + table + " + " + std::to_string(n);
    };
    return "    {3, 4, 2, \"spir64\", \"\", \"\", " + name + "_begin, " + name + "_end" +
           range("_kernels", image.kernels.n) + range("_sets", image.property_sets.n) + "},\n";
}

int main(int argc, char ** argv) {
    if (argc < 4) {
        fail("usage: syclc LIBSYCL_JIT OUT SOURCE [compiler option...]");
    }
    void * library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fail(dlerror());
    }
    const auto compile = (CompileSycl) dlsym(library, "compileSYCL");
    if (!compile) {
        fail("libsycl-jit has no entry point compileSYCL; another release than the pinned one?");
    }
    const std::string out = argv[2], source = read_file(argv[3]);
    std::vector<const char *> options(argv + 4, argv + argc);
    const Result result =
        compile({argv[3], source.c_str()}, {nullptr, 0}, {options.data(), options.size()}, {nullptr, 0}, false, SPIRV);
    if (result.log.text) {
        std::fputs(result.log.text, stderr);
    }
    if (result.error) {
        fail(std::string("the device half of ") + argv[3] + " does not compile");
    }

    std::string name = "image_" + out + "_";
    for (char & c : name) {
        c = std::isalnum((unsigned char) c) ? c : '_';
    }
    std::ofstream reg(out + ".reg.cpp");
    reg << "#include \"sycl_register.h\"\nusing namespace sycl_register;\n";
    std::string rows;
    size_t kernels = 0;
    for (size_t i = 0; i < result.images.n; i++) {
        const std::string number = std::to_string(i);
        rows += write_image(reg, result.images.items[i], out + "." + number + ".spv", name + number);
        kernels += result.images.items[i].kernels.n;
    }
    reg << "static const Image images[] = {\n"
        << rows << "    {}};\nstatic const Registration registration(images, " << result.images.n << ");\n";
    reg.close();
    if (!reg) {
        fail("cannot write " + out + ".reg.cpp");
    }
    std::printf("%s: %zu kernels\n", argv[3], kernels);
    std::fflush(nullptr);
    _Exit(0); // the library's own clean-up at exit is slow and not needed
}
