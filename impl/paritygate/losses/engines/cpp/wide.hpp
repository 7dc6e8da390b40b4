// Rows seen as vectors of float64, for SDPO's divergences: exp, log, the mixture's logarithm, sums, and how rows are written.
#pragma once
#include "problem.hpp"

enum { FORWARD_KL, REVERSE_KL, JSD };

typedef int64_t Long __attribute__((vector_size(8 * LANES)));

static inline Wide wide(double x) { return Wide{} + x; }
static inline Wide wide_at(const double* from) {
    Wide x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
static inline double sum_of(Wide x) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

// exp(x) for x up to 708, exactly 0 for -inf; NaN stays NaN.
#if defined(__AVX512F__)
// 2^n, n in sixteenths, whose fraction a permutation looks up, times exp(r), |r| <= log(2) / 32, by its series: 5e-16.
static inline Wide exp_wide(Wide x) {
    const double magic = 0x1.8p+48;  // adding it rounds to sixteenths, counted in the low bits
    static const double roots[16] = {0x1p+0, 0x1.0b5586cf9890fp+0, 0x1.172b83c7d517bp+0, 0x1.2387a6e756238p+0,
                                     0x1.306fe0a31b715p+0, 0x1.3dea64c123422p+0, 0x1.4bfdad5362a27p+0,
                                     0x1.5ab07dd485429p+0, 0x1.6a09e667f3bcdp+0, 0x1.7a11473eb0187p+0,
                                     0x1.8ace5422aa0dbp+0, 0x1.9c49182a3f090p+0, 0x1.ae89f995ad3adp+0,
                                     0x1.c199bdd85529cp+0, 0x1.d5818dcfba487p+0, 0x1.ea4afa2a490dap+0};
    __m512d v = _mm512_max_pd((__m512d)wide(-1100.0), (__m512d)x);
    __m512d shifted = _mm512_fmadd_pd(v, (__m512d)wide(0x1.71547652b82fep+0), (__m512d)wide(magic));
    Wide n = (Wide)shifted - magic, r = (Wide)_mm512_fnmadd_pd((__m512d)n, (__m512d)wide(0x1.62e42fefa39efp-1), v);
    Wide y = r * (1. / 720) + 1. / 120;
    y = y * r + 1. / 24;
    y = y * r + 1. / 6;
    y = y * r + 0.5;
    y = y * r + 1.0;
    y = y * r + 1.0;
    __m512d root = _mm512_permutex2var_pd(_mm512_loadu_pd(roots), (__m512i)shifted, _mm512_loadu_pd(roots + 8));
    return (Wide)_mm512_scalef_pd((__m512d)(y * (Wide)root), (__m512d)n);  // by 2^floor(n)
}
#else
// Below -708 it is 0.
static inline Wide exp_wide(Wide x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    Wide bounded = x > -708.0 ? x : wide(-708.0);
    bounded = bounded < 708.0 ? bounded : wide(708.0);
    Wide shifted = bounded * 1.4426950408889634 + magic, n = shifted - magic;
    Wide r = bounded - n * 0x1.62e42fefa3800p-1 - n * 0x1.ef35793c76730p-45;  // log 2 in two parts
    static const double factorials[] = {1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880,
                                        1. / 40320,      1. / 5040,      1. / 720,      1. / 120,     1. / 24,
                                        1. / 6,          1. / 2,         1,             1};
    Wide y = wide(factorials[0]);
    for (int i = 1; i < 14; i++) y = y * r + factorials[i];
    y = (Wide)((Long)y + ((Long)shifted << 52));
    y = x > -708.0 ? y : Wide{};
    return x == x ? y : x;
}
#endif

// log(x) for normal x > 0: the atanh series on [sqrt(1/2), sqrt(2)).
static inline Wide log_wide(Wide x) {
    const int64_t middle = 0x3fe6a09e667f3bcd;  // sqrt(1/2)
    Long shifted = (Long)x - middle, exponent = shifted >> 52;
    Wide m = (Wide)((shifted & 0x000fffffffffffff) + middle);
    Wide s = (m - 1.0) / (m + 1.0), z = s * s, y = wide(1. / 23);
    for (int k = 21; k > 1; k -= 2) y = y * z + 1. / k;
    y = y * z + 1.0;
    return __builtin_convertvector(exponent, Wide) * 0.6931471805599453 + (s * 2.0) * y;
}

// A weight w of the mixture: log(1 - w + w exp(t)) for any t, which is -log(p / m) for the teacher's w, t = log(q / p).
struct Share {
    double w, rest, log;
    explicit Share(double w) : w(w), rest(1 - w), log(std::log(w)) {}
    Wide log_mixed(Wide t) const {
        Wide usual = log_wide(rest + w * exp_wide(t < 700.0 ? t : wide(700.0)));
        return t < 700.0 ? usual : t + log;
    }
};

static inline bool any(Int x) {
    int64_t words[sizeof x / 8], all = 0;
    std::memcpy(words, &x, sizeof x);
    for (int64_t word : words) all |= word;
    return all != 0;
}

// A vector of float32 as two of float64, and back.
struct Pairs {
    Wide low, high;
};
static inline Pairs widened(Vec v) {
#if defined(__AVX512F__)  // what __builtin_convertvector does in twice as many steps
    __m512i high = _mm512_shuffle_i64x2((__m512i)v, (__m512i)v, 0xee);
    return {(Wide)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)), (Wide)_mm512_cvtps_pd((__m256)_mm512_castsi512_si256(high))};
#else
    Narrow half[2];
    std::memcpy(half, &v, sizeof v);
    return {__builtin_convertvector(half[0], Wide), __builtin_convertvector(half[1], Wide)};
#endif
}
static inline Vec narrowed(Pairs x) {
#if defined(__AVX512F__)
    __m512d low = (__m512d)_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)x.low));
    return (Vec)_mm512_insertf64x4(low, (__m256d)_mm512_cvtpd_ps((__m512d)x.high), 1);
#else
    Narrow half[2] = {__builtin_convertvector(x.low, Narrow), __builtin_convertvector(x.high, Narrow)};
    Vec v;
    std::memcpy(&v, half, sizeof v);
    return v;
#endif
}

// What float32 loses of a - b (Knuth's two-sum). Of half precision it is nothing that counts.
template <class D>
static inline Vec lost_in_difference(Vec a, Vec b) {
    if constexpr (sizeof(typename D::Storage) == 2) return Vec{};
    Vec d = a - b, back = d - a;
    return (a - (d - back)) - (b + back);
}

// One side of a row: its maximum and its sum of exponentials, never added up: the maximum may be 65504 and the logarithm
// of the sum near 0, whose digits the gradient of a nearly one-hot row is made of.
struct Total {
    double maximum = -INFINITY, sum = 0;
    void save(double* to) const { to[0] = maximum, to[1] = std::log(sum); }
    bool usable() const { return std::isfinite(maximum) && sum == sum; }
    double raise(double to) {  // by how much sums so far shrink
        if (!(to > maximum)) return 1;
        double shrink = maximum == -INFINITY ? 1 : std::exp(maximum - to);
        maximum = to, sum *= shrink;
        return shrink;
    }
};

// Beyond it half an ulp of float32 is too much for the `rest` of an exponential: such rows are written in float64.
static constexpr double FAR = 131072;

// The rows of a problem, seen as float64.
template <class D>
struct WideRows {
    typedef typename D::Storage T;
    const Problem& x;

    const T* student(int64_t i) const { return (const T*)x.student + i * x.student_stride; }
    const T* teacher(int64_t i) const { return (const T*)x.teacher + i * x.teacher_stride; }
    T* out(int64_t i) const { return (T*)x.out + i * x.out_stride; }

    // Calls f(from p, from q, count, top p, top q) with every block of the two rows and their maxima.
    template <class F>
    void each_block(int64_t i, F f) const {
        const T *p = student(i), *q = teacher(i);
        for (int64_t start = 0; start < x.vocabulary; start += BLOCK) {
            int64_t count = x.vocabulary - start < BLOCK ? x.vocabulary - start : BLOCK;
            f(p + start, q + start, count, block_maximum<D>(p + start, count), block_maximum<D>(q + start, count));
        }
    }

    // Calls f(p, q) with the float64 of every vector of a block, -inf beyond its end.
    template <class F>
    static void each_vector(const T* p, const T* q, int64_t count, F f) {
        auto both = [&](Vec a, Vec b) {
            Pairs u = widened(a), v = widened(b);
            f(u.low, v.low), f(u.high, v.high);
        };
        int64_t j = 0;
        for (; j + 2 * WIDTH <= count; j += 2 * WIDTH) {
            ask_after(p + j), ask_after(q + j);
            Two a = load_two<D>(p + j), b = load_two<D>(q + j);
            both(a.a, b.a), both(a.b, b.b);
        }
        for (; j < count; j += WIDTH) both(load_upto<D>(p + j, count - j), load_upto<D>(q + j, count - j));
    }

    // Writes a row: f(p, q) is the float64 of entries of it.
    template <class F>
    void write_wide(int64_t i, F f) const {
        write_row<D>(student(i), teacher(i), out(i), x.vocabulary, [=](Vec a, Vec b) {
            Pairs u = widened(a), v = widened(b);
            return narrowed({f(u.low, v.low), f(u.high, v.high)});
        });
    }

    // Whether `write_products` keeps the digits of float32 with this weight and centre.
    static bool products_fit(double weight, double centre) {
        return FUSED_MULTIPLY_ADD && std::fabs(weight) <= 0x1p100 && std::fabs(centre) <= FAR;
    }

    // Writes weight exp(p - centre) f(p, q) as a row: in float32 without float64 in between, yet with its digits. What of
    // the weight is no power of two is part of the exponent, or the product would round once more.
    template <class F>
    void write_products(int64_t i, double weight, double centre, F f) const {
        int power;
        centre -= std::log(std::fabs(std::frexp(weight, &power)));
        const float top = (float)centre, below = (float)(centre - top), scale = (float)std::ldexp(weight < 0 ? -1 : 1, power);
        write_row<D>(student(i), teacher(i), out(i), x.vocabulary, [=](Vec p, Vec q) {
            Vec e = exponential(p - top, lost_in_difference<D>(p, splat(top)) - below);
            return e > 0.f ? e * f(p, q) * scale : Vec{};
        });
    }

    // Calls f(i) for every row, on all threads.
    template <class F>
    void each_row(F f) const {
        std::vector<Span> spans;
        split(spans, 0, x.rows, 0);
        each_of(spans, x.threads, [&](const Span& span) {
            for (int64_t i = span.first; i < span.last; i++) f(i);
        });
    }
};
