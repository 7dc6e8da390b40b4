// Vectors of float32 as wide as the machine, and rows of float32, bfloat16 or float16 seen through them.
// Compiled on the machine that runs it (see libraries.py), so one source serves AVX-512, AVX2, SSE2 and NEON.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Int __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Half __attribute__((vector_size(2 * WIDTH)));

static constexpr int LANES = WIDTH / 2;
typedef double Wide __attribute__((vector_size(8 * LANES)));
typedef float Narrow __attribute__((vector_size(4 * LANES)));

static constexpr float INF = std::numeric_limits<float>::infinity();

static inline Vec splat(float x) { return Vec{} + x; }
static inline Bits bits(Vec x) { return (Bits)x; }
static inline Vec floats(Bits x) { return (Vec)x; }

// The first operand where it is larger, else the second: a NaN in the first is passed over, one in the second stays.
static inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^f on [-1/2, 1/2]: a minimax fit with the constant held at 1, relative error 2e-9 before rounding.
static inline Vec exp2_fraction(Vec f) {
    Vec y = splat(1.53716304e-4f);
    y = y * f + 1.33997151e-3f;
    y = y * f + 9.61837022e-3f;
    y = y * f + 5.55032951e-2f;
    y = y * f + 2.40226485e-1f;
    y = y * f + 6.93147205e-1f;
    return y * f + 1.0f;
}

// exp(x) for x <= 0 (up to 80 is fine), -inf gives exactly 0, NaN stays NaN.
static inline Vec exponential(Vec x) {
    const float per_octave = 1.44269504f;
#if defined(__AVX512F__)
    x = larger(splat(-110.f), x);
    Vec n = (Vec)_mm512_roundscale_ps((__m512)(x * per_octave), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vec fraction = (Vec)_mm512_fmsub_ps((__m512)x, (__m512)splat(per_octave), (__m512)n);  // no rounding before it
    return (Vec)_mm512_scalef_ps((__m512)exp2_fraction(fraction), (__m512)n);
#else
    // Adding 1.5 * 2^23 rounds to an integer in the low bits; 127 more, and they are the exponent of 2^n. n = -127, of
    // anything under -87.7, makes that 0, and a NaN is the polynomial's.
    const Vec magic = splat(12582912.f + 127.f);
    x = larger(splat(-88.03f), x);
    Vec shifted = x * per_octave + magic;
    return exp2_fraction(x * per_octave - (shifted - magic)) * floats(bits(shifted) << 23);
#endif
}

#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
#define FUSED_MULTIPLY_ADD true
#else
#define FUSED_MULTIPLY_ADD false
#endif

// exp(x + rest) for x < 80 and a small `rest`, as exact as float32 is where products are fused into sums; -inf gives 0.
static inline Vec exponential(Vec x, Vec rest) {
    const float per_octave = 1.44269504f, beyond = 1.925963033e-8f;  // log2(e) in two parts
    Vec least = splat(-87.3f), bounded = larger(least, x);
#if defined(__AVX512F__)
    Vec n = (Vec)_mm512_roundscale_ps((__m512)(bounded * per_octave), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vec fraction = (Vec)_mm512_fmsub_ps((__m512)bounded, (__m512)splat(per_octave), (__m512)n);
    Vec y = (Vec)_mm512_scalef_ps((__m512)exp2_fraction(fraction + (bounded * beyond + rest * per_octave)), (__m512)n);
#else
    const Vec magic = splat(12582912.f + 127.f);
    Vec shifted = bounded * per_octave + magic, fraction = bounded * per_octave - (shifted - magic);
    Vec y = exp2_fraction(fraction + (bounded * beyond + rest * per_octave)) * floats(bits(shifted) << 23);
#endif
    return x < least ? Vec{} : y;
}

static inline float highest(Vec x) {
    float best = x[0];
    for (int i = 1; i < WIDTH; i++) best = x[i] > best ? x[i] : best;
    return best;
}

static inline double total(Vec x) {
    double sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i];
    return sum;
}

// Sums of vectors of float32: each in float64, or GROUP of them in float32 first, which takes half as long.
static constexpr int GROUP = 16;

struct CarefulSum {
    Wide low{}, high{};
    void add(Vec x) {
        Narrow half[2];
        std::memcpy(half, &x, sizeof x);
        low += __builtin_convertvector(half[0], Wide);
        high += __builtin_convertvector(half[1], Wide);
    }
    void finish() {}  // after GROUP of them at the most
    double total() const {
        Wide both = low + high;
        double sum = 0;
        for (int i = 0; i < LANES; i++) sum += both[i];
        return sum;
    }
};
struct QuickSum {
    CarefulSum finished;
    Vec group{};
    void add(Vec x) { group += x; }
    void finish() { finished.add(group), group = Vec{}; }
    double total() const { return finished.total(); }
};

static inline Vec widen_float16(Half h) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)h);
#else
    Bits u = __builtin_convertvector(h, Bits);
    Bits magnitude = (u & 0x7fffu) << 13;
    Vec finite = floats(magnitude) * 0x1p112f;
    Bits value = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : bits(finite);
    return floats(value | ((u & 0x8000u) << 16));
#endif
}

static inline Half narrow_float16(Vec x) {
#if defined(__AVX512F__)
    return (Half)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    return (Half)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Bits u = bits(x), sign = u & 0x80000000u, magnitude = u ^ sign;
    Bits odd = (magnitude >> 13) & 1u;
    Bits normal = (magnitude + 0xc8000fffu + odd) >> 13;
    Bits small = bits(floats(magnitude) + 0.5f) - 0x3f000000u;  // denormals: the addition aligns and rounds
    Bits large = magnitude > 0x7f800000u ? (Bits{} + 0x7e00u) : (Bits{} + 0x7c00u);
    Bits value = magnitude >= 0x47800000u ? large : (magnitude < 0x38800000u ? small : normal);
    return __builtin_convertvector(value | (sign >> 16), Half);
#endif
}

static inline Bits round_bfloat16(Vec x) {  // into the upper half; a NaN whose lower half is full might leave it none
    Bits u = bits(x);
    return u + 0x7fffu + ((u >> 16) & 1u);
}

static inline Half narrow_bfloat16(Vec x) {
#if defined(__AVX512BF16__)
    return (Half)_mm512_cvtneps_pbh((__m512)x);
#else
    Bits rounded = x == x ? round_bfloat16(x) : Bits{} + 0x7fc00000u;
    return __builtin_convertvector(rounded >> 16, Half);
#endif
}

// Two vectors of a row. Of bfloat16 the even and the odd entries, so that neither reading nor writing moves lanes.
struct Two {
    Vec a, b;
};

// A dtype: its storage, and how a vector of it is read and written. Padding is -inf, which no sum sees.
struct Float32 {
    typedef float Storage;
    static Vec widen(Vec x) { return x; }
    static Vec narrow(Vec x) { return x; }
    typedef Vec Packed;
    static constexpr bool INTERLEAVED = false;
    static float padding() { return -INF; }
};
struct BFloat16 {
    typedef uint16_t Storage;
    typedef Half Packed;
    static Vec widen(Half h) { return floats(__builtin_convertvector(h, Bits) << 16); }
    static Half narrow(Vec x) { return narrow_bfloat16(x); }
    static constexpr bool INTERLEAVED = true;
    static Two widen(Bits x) { return {floats(x << 16), floats(x & 0xffff0000u)}; }
    // NaN of bfloat16 logits and of `factor` has an empty lower half.
    static Bits narrow(Two x) { return (round_bfloat16(x.a) >> 16) | (round_bfloat16(x.b) & 0xffff0000u); }
    static uint16_t padding() { return 0xff80; }
};
struct Float16 {
    typedef uint16_t Storage;
    typedef Half Packed;
    static Vec widen(Half h) { return widen_float16(h); }
    static Half narrow(Vec x) { return narrow_float16(x); }
    static constexpr bool INTERLEAVED = false;
    static uint16_t padding() { return 0xfc00; }
};

template <class D>
static inline Vec load(const typename D::Storage* from) {
    typename D::Packed packed;
    std::memcpy(&packed, from, sizeof packed);
    return D::widen(packed);
}

template <class D>
static inline void store(typename D::Storage* to, Vec x) {
    typename D::Packed packed = D::narrow(x);
    std::memcpy(to, &packed, sizeof packed);
}

template <class D>
static inline Two load_two(const typename D::Storage* from) {
    if constexpr (D::INTERLEAVED) {
        Bits both;
        std::memcpy(&both, from, sizeof both);
        return D::widen(both);
    } else {
        return {load<D>(from), load<D>(from + WIDTH)};
    }
}

// The last, partial vector of a row.
template <class D>
static inline Vec load_part(const typename D::Storage* from, int count) {
    typename D::Storage buffer[WIDTH];
    for (int i = 0; i < WIDTH; i++) buffer[i] = i < count ? from[i] : D::padding();
    return load<D>(buffer);
}

template <class D>
static inline void store_part(typename D::Storage* to, Vec x, int count) {
    typename D::Storage buffer[WIDTH];
    store<D>(buffer, x);
    std::memcpy(to, buffer, count * sizeof buffer[0]);
}

template <class D>
static inline double load_one(const typename D::Storage* from) {
    return load_part<D>(from, 1)[0];
}

template <class D>
static inline void store_one(typename D::Storage* to, double x) {
    store_part<D>(to, splat((float)x), 1);
}
