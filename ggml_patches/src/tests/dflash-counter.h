#pragma once

// Counts checks; prints those that fail.

#include <cstdarg>
#include <cstdio>
#include <string>

struct Counter {
    int checks = 0, failures = 0;
    std::string label; // the case that runs, for messages

#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    void expect(bool ok, const char * format, ...) {
        checks++;
        if (ok) {
            return;
        }
        failures++;
        if (failures <= 40) {
            va_list args;
            va_start(args, format);
            std::printf("FAIL %s: ", label.c_str());
            std::vprintf(format, args);
            std::printf("\n");
            va_end(args);
        }
    }
};

inline Counter & counter() {
    static Counter instance;
    return instance;
}
