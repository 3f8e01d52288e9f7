# Objects of a SYCL module: make -f sycl.mk SDK=... GGML=... HERE=... FILES="..." , in the folder of the module.
# FILES are names in ggml-sycl without .cpp. NAME becomes obj/NAME.reg.o (syclc: SPIR-V) and obj/NAME.host.o (clang-19).

SYCL := $(GGML)/src/ggml-sycl
SYCLC := env LD_LIBRARY_PATH=$(SDK)/lib $(SDK)/bin/syclc $(SDK)/lib/libsycl-jit.so

# HAS_BF16 is derived from the compiler upstream: Intel's front end has it, clang-19 would disagree.
DEFINES := -DNDEBUG -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -DGGML_BACKEND_BUILD -DGGML_BACKEND_DL -DGGML_BACKEND_SHARED \
	-DGGML_SHARED -DGGML_SCHED_MAX_COPIES=4 -DGGML_SYCL_DNNL=0 -DGGML_SYCL_WARP_SIZE=16 -DGGML_SYCL_GRAPH \
	-DGGML_SYCL_HAS_BF16
COMMON := -std=c++17 -O2 $(DEFINES) -I$(GGML)/include -I$(GGML)/src -I$(SYCL) -isystem $(SDK)/include
HOST := -fPIC -fvisibility=hidden -Xclang -fsycl-is-host -D__SYCL_UNNAMED_LAMBDA__ -DSYCL_DISABLE_FSYCL_SYCLHPP_WARNING

# Rounding is part of our ops' contract: fused where the source says so and nowhere else.
obj/%: FLAGS := -w -Wno-narrowing
obj/dflash/%: FLAGS := -ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-narrowing

# Upstream's files do not see our headers, but for the dispatch file.
OUR_HEADERS := $(wildcard $(GGML)/include/ggml-dflash*.h $(GGML)/src/ggml-dflash*.h $(SYCL)/dflash/*.hpp)
HEADERS := $(wildcard $(GGML)/include/*.h $(GGML)/src/*.h $(SYCL)/*.hpp $(SYCL)/dpct/*.hpp)
HEADERS := $(filter-out $(OUR_HEADERS),$(HEADERS))

all: $(FILES:%=obj/%.reg.o) $(FILES:%=obj/%.host.o)

$(foreach name,ggml-sycl $(filter dflash/%,$(FILES)),obj/$(name).reg.cpp obj/$(name).h): $(OUR_HEADERS)

obj/%.reg.cpp obj/%.h: $(SYCL)/%.cpp $(HEADERS) $(SDK)/stamp
	@mkdir -p $(@D)
	@bash $(HERE)/strict.sh obj/$*.device.log $(SYCLC) obj/$* $< $(COMMON) $(FLAGS) \
		-Xclang -fsycl-int-header=obj/$*.h -Xclang -fsycl-int-footer=obj/$*.footer.h
	@tail -n 1 obj/$*.device.log

obj/%.reg.o: obj/%.reg.cpp $(HERE)/sycl_register.h
	@g++ -std=c++17 -fPIC -I$(HERE) -c $< -o $@

obj/%.host.o: $(SYCL)/%.cpp obj/%.h
	@bash $(HERE)/strict.sh obj/$*.host.log clang++-19 $(COMMON) $(FLAGS) $(HOST) -include obj/$*.h -c $< -o $@

.PRECIOUS: obj/%.reg.cpp obj/%.h
.DELETE_ON_ERROR:
