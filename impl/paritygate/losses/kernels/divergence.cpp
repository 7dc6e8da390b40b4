// SDPO at logit level over the full vocabulary: KL(q || p), KL(p || q), the mixture divergence, and their gradients.
// In float64 from the first operation on: a divergence of nearly equal rows, times a mixture weight near 0 or 1, is a
// small difference of large terms whichever way it is written, and these rows are read at memory's pace all the same.
#include "problem.hpp"

enum { FORWARD_KL, REVERSE_KL, JSD };

static constexpr int LANES = WIDTH / 2;
static constexpr int64_t PART = 512;  // entries of a row in float64 at a time: both sides stay in the first-level cache

typedef double Wide __attribute__((vector_size(8 * LANES)));
typedef int64_t Long __attribute__((vector_size(8 * LANES)));
typedef float Narrow __attribute__((vector_size(4 * LANES)));

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
    void keep(double* to) const { to[0] = maximum, to[1] = std::log(sum); }
    double raise(double to) {  // by how much sums so far shrink
        if (!(to > maximum)) return 1;
        double shrink = maximum == -INFINITY ? 1 : std::exp(maximum - to);
        maximum = to, sum *= shrink;
        return shrink;
    }
};

template <class D>
struct Divergence {
    typedef typename D::Storage T;
    const Problem& x;
    int kind;
    double mixture;  // the teacher's weight a in m = (1 - a) p + a q
    double* known;   // (N, 6): the divergence, KL(p || m), maximum and log sum of the student, and of the teacher

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

    // Calls f(start, count, p, q) with every part of the two rows as float64 and their maxima.
    template <class F>
    void each_part(int64_t i, F f) const {
        const T *p = (const T*)x.student + i * x.student_stride, *q = (const T*)x.teacher + i * x.teacher_stride;
        alignas(64) double wide_p[PART], wide_q[PART];
        for (int64_t start = 0; start < x.vocabulary; start += PART) {
            int64_t count = x.vocabulary - start < PART ? x.vocabulary - start : PART;
            double top_p = read(p + start, count, wide_p), top_q = read(q + start, count, wide_q);
            f(start, count, wide_p, wide_q, top_p, top_q);
        }
    }

    void measure(int64_t i) const {
        // In KL(a || b), cross = sum exp(a - max a) ((a - max a) - (b - max b)).
        bool forward = kind == FORWARD_KL;
        Total of_a, of_b;
        double cross = 0;
        each_part(i, [&](int64_t, int64_t count, const double* p, const double* q, double top_p, double top_q) {
            const double *a = forward ? q : p, *b = forward ? p : q;
            double top_a = forward ? top_q : top_p, top_b = forward ? top_p : top_q;
            if (of_b.maximum != -INFINITY && top_b > of_b.maximum) cross += of_a.sum * (top_b - of_b.maximum);
            of_b.raise(top_b);
            if (of_a.maximum != -INFINITY && top_a > of_a.maximum) cross += of_a.sum * (of_a.maximum - top_a);
            cross *= of_a.raise(top_a);
            double ca = of_a.maximum == -INFINITY ? 0 : of_a.maximum, cb = of_b.maximum == -INFINITY ? 0 : of_b.maximum;
            Wide sum_a{}, sum_b{}, crossed{};
            for (int64_t j = 0; j < count; j += LANES) {
                Wide da = wide_at(a + j) - ca, db = wide_at(b + j) - cb, e = exp_wide(da);
                sum_a += e, sum_b += exp_wide(db);
                crossed += e > 0.0 ? e * (da - db) : Wide{};
            }
            of_a.sum += sum_of(sum_a), of_b.sum += sum_of(sum_b), cross += sum_of(crossed);
        });
        double* k = known + 6 * i;
        (forward ? of_b : of_a).keep(k + 2), (forward ? of_a : of_b).keep(k + 4);
        if (kind == JSD) return against_mixture(i);
        double kl = cross / of_a.sum - std::log(of_a.sum) + std::log(of_b.sum);
        k[0] = kl < 0 ? 0 : kl;
    }

    void against_mixture(int64_t i) const {
        Share of_teacher(mixture), of_student(1 - mixture);
        double *k = known + 6 * i, top_p = k[2], log_p = k[3], top_q = k[4], log_q = k[5], p_part = 0, q_part = 0;
        each_part(i, [&](int64_t, int64_t count, const double* p, const double* q, double, double) {
            Wide of_p{}, of_q{};
            for (int64_t j = 0; j < count; j += LANES) {
                Wide lp = wide_at(p + j) - top_p - log_p, lq = wide_at(q + j) - top_q - log_q;
                Wide mp = exp_wide(lp), mq = exp_wide(lq);
                of_p -= mp > 0.0 ? mp * of_teacher.log_mixed(lq - lp) : Wide{};
                of_q -= mq > 0.0 ? mq * of_student.log_mixed(lp - lq) : Wide{};
            }
            p_part += sum_of(of_p), q_part += sum_of(of_q);
        });
        double value = (1 - mixture) * p_part + mixture * q_part;
        double sums = top_p + log_p + top_q + log_q;
        k[0] = sums == sums ? (value < 0 ? 0 : value) : NAN;
        k[1] = p_part;
    }

    void differentiate(int64_t i, double scale) const {
        T* out = (T*)x.out + i * x.out_stride;
        const double *k = known + 6 * i, top_p = k[2], log_p = k[3], top_q = k[4], log_q = k[5];
        if (scale == 0) {
            std::memset(out, 0, x.vocabulary * sizeof *out);
            return;
        }
        // Where the teacher excludes what the student may do, KL(p || q) is +inf and has no gradient.
        double mean = kind == FORWARD_KL ? 0 : kind == REVERSE_KL ? k[0] : k[1];
        double w = std::isfinite(mean) ? (kind == JSD ? scale * (1 - mixture) : scale) : NAN;
        Share of_teacher(kind == JSD ? mixture : 0.5);
        each_part(i, [&](int64_t start, int64_t count, const double* p, const double* q, double, double) {
            alignas(64) float row[PART];
            for (int64_t j = 0; j < count; j += LANES) {
                Wide lp = wide_at(p + j) - top_p - log_p, lq = wide_at(q + j) - top_q - log_q, mass = exp_wide(lp), slope;
                if (kind == FORWARD_KL)
                    slope = mass - exp_wide(lq);
                else if (kind == REVERSE_KL)
                    slope = mass > 0.0 ? mass * (lp - lq - mean) : Wide{};
                else
                    slope = mass > 0.0 ? mass * (-of_teacher.log_mixed(lq - lp) - mean) : Wide{};
                Narrow rounded = __builtin_convertvector(w * slope, Narrow);
                std::memcpy(row + j, &rounded, sizeof rounded);
            }
            for (int64_t j = 0; j < count; j += WIDTH) {
                if (count - j >= WIDTH)
                    store<D>(out + start + j, load<Float32>(row + j));
                else
                    store_part<D>(out + start + j, load_part<Float32>(row + j, (int)(count - j)), (int)(count - j));
            }
        });
    }

    void run(const uint8_t* read, const double* scale) const {
        std::vector<Span> spans;
        split(spans, 0, x.rows, 0);
        each_of(spans, x.threads, [&](const Span& span) {
            for (int64_t i = span.first; i < span.last; i++) {
                if (scale)
                    differentiate(i, read[i] ? scale[i] : 0);
                else if (read[i])
                    measure(i);
            }
        });
    }
};

extern "C" {

// Without `scale` what is known of the rows to read; with it the gradient of sum_i scale_i D_i.
void paritygate_divergence(const Problem* x, int32_t kind, double mixture, const uint8_t* read, const double* scale,
                           double* known) {
    if (x->out) expect_to_fill(x->out, x->rows * x->out_stride * (x->dtype == 0 ? sizeof(float) : sizeof(uint16_t)));
    if (x->dtype == 0) Divergence<Float32>{*x, kind, mixture, known}.run(read, scale);
    if (x->dtype == 1) Divergence<BFloat16>{*x, kind, mixture, known}.run(read, scale);
    if (x->dtype == 2) Divergence<Float16>{*x, kind, mixture, known}.run(read, scale);
}
}
