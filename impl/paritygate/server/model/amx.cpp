// AMX tiles, or their emulation, as a library of their own: compiled where the CPU has tiles, and by tests.
#include "amx.hpp"
#include "threads.hpp"

extern "C" {

// Why no AMX tiles are used here, or null.
const char* tiles_refused() {
#if AMX
    return amx::refused();
#else
    return "the compiler found no AMX here";
#endif
}

void tiled(const amx::Product* x, int64_t emulated) {
    auto each = [&](int64_t units, int64_t size, auto work) { share_units(units, threads_for(x->threads, size), work); };
#if AMX
    if (!emulated) return amx::multiply<amx::Hardware>(*x, each);
#endif
    amx::multiply<amx::Emulated>(*x, each);
}
}
