// Products of float32 rows with a bfloat16 weight on AMX tiles, every row in three parts (design/030). The kernel is
// written against five tile operations: those of the CPU, or the same in plain C++, with which any machine tests it.
#pragma once
#include "vector.hpp"

#include <algorithm>
#include <cmath>
#include <vector>
#if defined(__linux__) && defined(__x86_64__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#else
#define AMX 0
#endif

namespace amx {

static constexpr int64_t SIDE = 16;   // rows of a tile, and its columns of float32 or of pairs of bfloat16
static constexpr int64_t STEP = 32;   // terms of a sum that one operation takes
static constexpr int64_t PARTS = 3;   // bfloat16 numbers whose sum is one of float32: 8 bits of 24 each
static constexpr int64_t TILE = SIDE * STEP;  // bfloat16 numbers of a tile

// The operations after Intel's Software Developer's Manual, volume 2, TDPBF16PS: the products of the even terms and
// those of the odd ones are fused into a sum each, both sums are added, and then to the tile; to the nearest, ties to
// even, and what is denormal is zero, going in and coming out.
struct Emulated {
    alignas(64) unsigned char tiles[8][SIDE * 64];

    static float flushed(float x) {
        return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
    }
    static float widened(const unsigned char* from) {
        const uint16_t* half = (const uint16_t*)from;
        uint32_t word = (uint32_t)*half << 16;
        float x;
        std::memcpy(&x, &word, sizeof x);
        return flushed(x);
    }
    template <int T>
    void zero() {
        std::memset(tiles[T], 0, sizeof tiles[T]);
    }
    template <int T>
    void load(const void* from, int64_t stride) {
        for (int64_t row = 0; row < SIDE; row++)
            std::memcpy(tiles[T] + row * 64, (const char*)from + row * stride, 64);
    }
    template <int T>
    void store(void* to, int64_t stride) {
        for (int64_t row = 0; row < SIDE; row++)
            std::memcpy((char*)to + row * stride, tiles[T] + row * 64, 64);
    }
    template <int C, int A, int B>
    void dot() {
        float a[TILE], b[TILE];
        for (int64_t i = 0; i < TILE; i++)
            a[i] = widened(tiles[A] + 2 * i), b[i] = widened(tiles[B] + 2 * i);
        for (int64_t m = 0; m < SIDE; m++) {
            float even[SIDE] = {}, odd[SIDE] = {}, sums[SIDE];
            for (int64_t k = 0; k < SIDE; k++)
                for (int64_t n = 0; n < SIDE; n++) {
                    even[n] = flushed(std::fma(a[m * STEP + 2 * k], b[k * STEP + 2 * n], even[n]));
                    odd[n] = flushed(std::fma(a[m * STEP + 2 * k + 1], b[k * STEP + 2 * n + 1], odd[n]));
                }
            std::memcpy(sums, tiles[C] + m * 64, sizeof sums);
            for (int64_t n = 0; n < SIDE; n++) sums[n] = flushed(flushed(sums[n]) + flushed(even[n] + odd[n]));
            std::memcpy(tiles[C] + m * 64, sums, sizeof sums);
        }
    }
};

#if AMX
// The CPU's own. A thread has its tiles from the first line to the last of the object's life, and none after it.
struct Hardware {
    struct Config {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    };
    Hardware() {
        const Config config;
        static_assert(sizeof config == 64, "what LDTILECFG reads");
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    Hardware(const Hardware&) = delete;
    ~Hardware() { asm volatile("tilerelease"); }

    template <int T>
    void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(T));
    }
    template <int T>
    void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
    }
    template <int C, int A, int B>
    void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    }
};
#endif

struct Product {
    const float* rows;       // (count, inputs)
    const uint16_t* weight;  // (panels, steps * 16, 32, 2), zeros beyond the last input and the last output
    float* out;              // (count, outputs)
    int64_t count, inputs, steps, panels, outputs, threads;
};

// Up to 16 rows from `first` on as tiles (steps, PARTS, 16, 32), the largest part first, zeros beyond the last row
// and input. Each part is what bfloat16 holds of what those before left, 8 bits more.
static void split(const Product& x, int64_t first, uint16_t* parts) {
    std::memset(parts, 0, x.steps * PARTS * TILE * sizeof *parts);
    for (int64_t row = 0; row < std::min(SIDE, x.count - first); row++)
        for (int64_t k = 0; k < x.inputs; k += WIDTH) {
            float some[WIDTH] = {};
            const int64_t there = std::min<int64_t>(WIDTH, x.inputs - k);
            std::memcpy(some, x.rows + (first + row) * x.inputs + k, there * sizeof *some);
            Vec left = load<Float32>(some);
            uint16_t* to = parts + k / STEP * PARTS * TILE + row * STEP + k % STEP;
            for (int64_t part = 0; part < PARTS; part++, to += TILE) {
                const Half held = narrow_bfloat16(left);
                std::memcpy(to, &held, sizeof held);
                left -= BFloat16::widen(held);
            }
        }
}

template <class Tiles, int C>
static void put(Tiles& tiles, const Product& x, int64_t row, int64_t column) {
    float* to = x.out + row * x.outputs + column;
    const int64_t rows = std::min(SIDE, x.count - row), columns = std::min(SIDE, x.outputs - column);
    if (rows == SIDE && columns == SIDE) return tiles.template store<C>(to, x.outputs * sizeof *to);
    if (rows <= 0 || columns <= 0) return;
    alignas(64) float whole[SIDE * SIDE];
    tiles.template store<C>(whole, SIDE * sizeof *whole);
    for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * x.outputs, whole + i * SIDE, columns * sizeof *whole);
}

// 16 rows, or 32, times a panel. Every tile of sums is one chain over the inputs, 32 at a time, of each the parts
// from the largest to the smallest, however many rows there are; no row's sums see another row.
template <class Tiles, bool TWO>
static void product(Tiles& tiles, const Product& x, const uint16_t* parts, int64_t row, int64_t panel) {
    const uint16_t *low = parts, *high = parts + x.steps * PARTS * TILE;
    const uint16_t* weight = x.weight + panel * x.steps * 2 * TILE;
    tiles.template zero<0>(), tiles.template zero<1>();
    if (TWO) tiles.template zero<2>(), tiles.template zero<3>();
    for (int64_t step = 0; step < x.steps; step++, weight += 2 * TILE) {
        tiles.template load<4>(weight, 128), tiles.template load<5>(weight + STEP, 128);
        for (int64_t part = 0; part < PARTS; part++, low += TILE, high += TILE) {
            tiles.template load<6>(low, 64);
            tiles.template dot<0, 6, 4>(), tiles.template dot<1, 6, 5>();
            if (!TWO) continue;
            tiles.template load<7>(high, 64);
            tiles.template dot<2, 7, 4>(), tiles.template dot<3, 7, 5>();
        }
    }
    put<Tiles, 0>(tiles, x, row, panel * 32), put<Tiles, 1>(tiles, x, row, panel * 32 + SIDE);
    if (!TWO) return;
    put<Tiles, 2>(tiles, x, row + SIDE, panel * 32), put<Tiles, 3>(tiles, x, row + SIDE, panel * 32 + SIDE);
}

// `each(units, size, work)` does every unit of work, on whatever threads: 96 rows and eight panels at a time, so that
// the rows' parts stay in a second cache. Tiles are configured and released by the thread that uses them.
template <class Tiles, class Each>
static void multiply(const Product& x, Each each) {
    const int64_t blocks = (x.count + SIDE - 1) / SIDE, block = x.steps * PARTS * TILE, rows = 6, group = 8;
    const int64_t groups = (x.panels + group - 1) / group;
    std::vector<uint16_t> memory(blocks * block + 32);
    uint16_t* parts = (uint16_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    each(blocks, x.count * x.inputs, [&](int64_t i) { split(x, i * SIDE, parts + i * block); });
    each((blocks + rows - 1) / rows * groups, 2 * x.count * x.inputs * x.outputs, [&](int64_t unit) {
        Tiles tiles;
        const int64_t first = unit / groups * rows, last = std::min(blocks, first + rows);
        const int64_t panel = unit % groups * group, end = std::min(panel + group, x.panels);
        for (int64_t p = panel; p < end; p++)
            for (int64_t i = first; i < last; i += 2)
                i + 1 < last ? product<Tiles, true>(tiles, x, parts + i * block, i * SIDE, p)
                             : product<Tiles, false>(tiles, x, parts + i * block, i * SIDE, p);
    });
}

// Whether tiles multiply as the emulated ones: rows whose numbers need every part, sums that are exact in any order.
template <class Tiles>
static bool right() {
    const int64_t count = 37, inputs = 70, steps = 3, panels = 2, outputs = 45;
    std::vector<float> rows(count * inputs), got(count * outputs, -1.f), want(count * outputs, -2.f);
    std::vector<uint16_t> weight(panels * steps * 2 * TILE);
    uint32_t state = 1;
    auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 8; };
    for (auto& x : rows) x = (float)(next() % (1 << 18)) - (1 << 17);
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t k = 0; k < inputs; k++) {
            static const uint16_t SIGNS[] = {0xbf80, 0, 0x3f80};  // -1, 0, 1
            weight[((o / 32 * steps * SIDE + k / 2) * 32 + o % 32) * 2 + k % 2] = SIGNS[next() % 3];
        }
    Product x{rows.data(), weight.data(), got.data(), count, inputs, steps, panels, outputs, 1};
    auto alone = [](int64_t units, int64_t, auto work) {
        for (int64_t i = 0; i < units; i++) work(i);
    };
    multiply<Tiles>(x, alone);
    x.out = want.data();
    multiply<Emulated>(x, alone);
    if (std::memcmp(got.data(), want.data(), got.size() * sizeof(float))) return false;
    for (auto& y : rows) y = (y + .5f) / 3e4f;  // sums that are rounded: as close as rounding, and alone as together
    multiply<Emulated>(x, alone);
    x.out = got.data();
    multiply<Tiles>(x, alone);
    for (size_t i = 0; i < got.size(); i++)
        if (!(std::fabs(got[i] - want[i]) < 1e-4f)) return false;
    x.count = 1, x.rows += 21 * inputs, x.out = want.data();
    multiply<Tiles>(x, alone);
    return !std::memcmp(want.data(), got.data() + 21 * outputs, outputs * sizeof(float));
}

#if AMX
// Why the tiles of this CPU are not used, or null; asked for once. A child process takes the first steps on them: an
// instruction that kills it kills no server.
static const char* refused() {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & d >> 24 & 1)) return "the CPU has no AMX";
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return "the system saves no extended state";
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return "the system does not save AMX tiles";
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) || b != (8u << 16 | 64) || (c & 0xffff) != SIDE)
        return "the CPU's tiles are not eight of 16 rows of 64 bytes";
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return "the system does not permit AMX tiles";  // ARCH_REQ_XCOMP_PERM
    const pid_t child = fork();
    if (child == 0) _exit(right<Hardware>() ? 0 : 1);
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return "no process could be started to try AMX tiles";
    if (!WIFEXITED(status)) return "a process that tried AMX tiles was killed";
    return WEXITSTATUS(status) ? "AMX tiles do not multiply as Intel's manual says" : nullptr;
}
#endif
}  // namespace amx
