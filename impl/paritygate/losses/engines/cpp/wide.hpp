// Rows seen as vectors of float64, for SDPO's divergences: exp, log, the mixture's logarithm, sums, and how rows are written.
#pragma once
#include "problem.hpp"

enum { FORWARD_KL, REVERSE_KL, JSD };

static constexpr int64_t PART = 512;  // entries of a row in float64 at a time: both sides stay in the first-level cache

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

// exp(x), exactly 0 for -inf and below -708, for x up to 708; NaN stays NaN.
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

// One side of a row: its maximum and its sum of exponentials, never added up: the maximum may be 65504 and the logarithm
// of the sum near 0, whose digits the gradient of a nearly one-hot row is made of.
struct Total {
    double maximum = -INFINITY, sum = 0;
    void save(double* to) const { to[0] = maximum, to[1] = std::log(sum); }
    double raise(double to) {  // by how much sums so far shrink
        if (!(to > maximum)) return 1;
        double shrink = maximum == -INFINITY ? 1 : std::exp(maximum - to);
        maximum = to, sum *= shrink;
        return shrink;
    }
};

// The rows of a problem, a part of one at a time in float64.
template <class D>
struct WideRows {
    typedef typename D::Storage T;
    const Problem& x;

    const T* student(int64_t i) const { return (const T*)x.student + i * x.student_stride; }
    const T* teacher(int64_t i) const { return (const T*)x.teacher + i * x.teacher_stride; }
    T* out(int64_t i) const { return (T*)x.out + i * x.out_stride; }

    // Reads part of a row as float64, -inf beyond its end up to a whole vector; returns its maximum.
    static double read(const T* from, int64_t count, double* to) {
        Vec top = splat(-INF);
        for (int64_t j = 0; j < count; j += WIDTH) {
            Vec v = load_upto<D>(from + j, count - j);
            Narrow half[2];
            std::memcpy(half, &v, sizeof v);
            for (int i = 0; i < 2; i++) {
                Wide widened = __builtin_convertvector(half[i], Wide);
                std::memcpy(to + j + i * LANES, &widened, sizeof widened);
            }
            top = larger(v, top);
        }
        return highest(top);
    }

    // Calls f(start, count, p, q, top p, top q) with every part of the two rows as float64 and their maxima.
    template <class F>
    void each_part(int64_t i, F f) const {
        alignas(64) double wide_p[PART], wide_q[PART];
        for (int64_t start = 0; start < x.vocabulary; start += PART) {
            int64_t count = x.vocabulary - start < PART ? x.vocabulary - start : PART;
            double top_p = read(student(i) + start, count, wide_p), top_q = read(teacher(i) + start, count, wide_q);
            f(start, count, wide_p, wide_q, top_p, top_q);
        }
    }

    // Writes part of a row: f(j) is the float64 of entries j .. j + LANES of it.
    template <class F>
    static void write(T* to, int64_t count, F f) {
        alignas(64) float row[PART];
        for (int64_t j = 0; j < count; j += LANES) {
            Narrow rounded = __builtin_convertvector(f(j), Narrow);
            std::memcpy(row + j, &rounded, sizeof rounded);
        }
        for (int64_t j = 0; j < count; j += WIDTH) {
            if (count - j >= WIDTH)
                store<D>(to + j, load<Float32>(row + j));
            else
                store_part<D>(to + j, load_part<Float32>(row + j, (int)(count - j)), (int)(count - j));
        }
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
