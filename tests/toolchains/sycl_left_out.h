#pragma once

// Functions of upstream's backend that a test module does not hold: each ends the program with its name.

#include <cstdio>
#include <cstdlib>

[[noreturn]] static void left_out(const char * symbol) {
    std::fprintf(stderr, "not in this test module: %s\n", symbol);
    std::abort();
}

#define LEFT_OUT(function, symbol)                                                                                     \
    extern "C" void function() asm(symbol);                                                                            \
    extern "C" void function() {                                                                                       \
        left_out(symbol);                                                                                              \
    }
