// One row of the vocabulary at a time: its sums in one sweep, its gradient in a second that finds it in the cache.
#pragma once
#include "vector.hpp"

static constexpr int64_t BLOCK = 2048;  // two blocks of float32 stay in the first-level cache between maximum and sum

static constexpr float NEAR = 0.25f;

// Columns of a row's statistics, float64: the order of row_stats.py.
enum { STUDENT_MAXIMUM, STUDENT_SUM, TEACHER_MAXIMUM, TEACHER_SUM, STUDENT_LOGPROB, TEACHER_LOGPROB, KL, SLOPE, CURVE, COLUMNS };

// What is measured of a row. The maximum and the sum of exponentials are kept apart: one float32 log-sum-exp loses 5e-4 at
// float16's +-65504. `cross` = sum exp(q - maximum q) ((q - maximum q) - (p - maximum p)), from which KL(q || p) follows.
struct Side {
    float maximum = -INF;
    double sum = 0;
    float centre() const { return maximum == -INF ? 0.f : maximum; }
    double log_sum() const { return std::log(sum); }
    bool usable() const { return std::isfinite(maximum) && sum == sum; }
};

struct Pair {
    Side p, q;
    double cross = 0;
    // While |p - q| <= NEAR all along the row: sums of exp(q - maximum q) times u = p - q, and times exp(u) - 1 - u. From
    // these the KL and p - q of nearly equal rows keep their digits, where a difference of two float32 softmaxes has none.
    bool near = true;
    double slope = 0, curve = 0;

    void raise_p(float to) {
        if (!(to > p.maximum)) return;
        if (p.maximum != -INF) cross += q.sum * ((double)to - p.maximum);
        p.sum *= std::exp((double)p.maximum - to);
        p.maximum = to;
    }
    void raise_q(float to) {
        if (!(to > q.maximum)) return;
        if (q.maximum != -INF) {
            double shrink = std::exp((double)q.maximum - to);
            cross = shrink * (cross + q.sum * ((double)q.maximum - to));
            q.sum *= shrink, slope *= shrink, curve *= shrink;
        }
        q.maximum = to;
    }
    void save(double* s) const {
        s[STUDENT_MAXIMUM] = p.maximum, s[STUDENT_SUM] = p.sum;
        s[TEACHER_MAXIMUM] = q.maximum, s[TEACHER_SUM] = q.sum;
        s[SLOPE] = near ? slope : std::nan(""), s[CURVE] = curve;
    }
    void load(const double* s) {
        p.maximum = (float)s[STUDENT_MAXIMUM], p.sum = s[STUDENT_SUM];
        q.maximum = (float)s[TEACHER_MAXIMUM], q.sum = s[TEACHER_SUM];
        near = s[SLOPE] == s[SLOPE], slope = s[SLOPE], curve = s[CURVE];
    }
    double shift() const { return std::log1p((slope + curve) / q.sum); }  // log sum exp p - log sum exp q, where near
    void finish() {                                                       // what the near sums say of the student
        if (p.maximum == -INF || q.maximum == -INF) return;
        double diff = (double)p.maximum - q.maximum;
        p.sum = (q.sum + slope + curve) * std::exp(-diff);
        if (p.sum < 1) p.sum = 1;  // the maximum alone is 1: no log-probability above 0 by rounding
        cross = q.sum * diff - slope;
    }
};

template <class D>
static inline Vec load_upto(const typename D::Storage* from, int64_t left) {
    return left >= WIDTH ? load<D>(from) : load_part<D>(from, (int)left);
}

// Asks for what a group of vectors will be in the next block, so that memory works while this block is computed.
template <class T>
static inline void ask_ahead(const T* x) {
    for (int64_t j = 0; j < GROUP * WIDTH; j += 64 / (int64_t)sizeof(T)) __builtin_prefetch(x + j + BLOCK);
}

// The same of two vectors: in the next block, and in the one before, which a row that is written backwards reads next.
template <class T>
static inline void ask_after(const T* x) {
    for (int64_t j = 0; j < 2 * WIDTH; j += 64 / (int64_t)sizeof(T)) __builtin_prefetch(x + j + BLOCK);
}
template <class T>
static inline void ask_before(const T* x) {
    for (int64_t j = 0; j < 2 * WIDTH; j += 64 / (int64_t)sizeof(T)) __builtin_prefetch(x + j - BLOCK);
}

template <class D>
static inline float block_maximum(const typename D::Storage* x, int64_t count) {
    Vec a = splat(-INF), b = a;
    int64_t j = 0;
    for (; j + 2 * WIDTH <= count; j += 2 * WIDTH) {
        Two v = load_two<D>(x + j);
        a = larger(v.a, a), b = larger(v.b, b);
    }
    for (; j < count; j += WIDTH) a = larger(load_upto<D>(x + j, count - j), a);
    return highest(larger(a, b));
}

// exp(u) - 1 - u and exp(u) - 1 by their series, for |u| <= 1/4 and 1/2: relative error about 1e-8 before rounding.
static inline Vec curvature(Vec u, Vec rest) {
    Vec y = rest * (u * (1.f / 7)) + 1.0f;
    y = y * (u * (1.f / 6)) + 1.0f;
    y = y * (u * (1.f / 5)) + 1.0f;
    y = y * (u * (1.f / 4)) + 1.0f;
    y = y * (u * (1.f / 3)) + 1.0f;
    return y * (u * u * 0.5f);
}
static inline Vec exponential_minus_one(Vec u) {
    Vec y = u * (1.f / 9) + 1.0f;
    y = y * (u * (1.f / 8)) + 1.0f;
    return u + curvature(u, y);
}

static inline Vec difference(Vec p, Vec q) {
    return larger(p, q) == -INF ? Vec{} : p - q;  // of -inf in both: none
}

template <class D>
static bool block_is_near(const typename D::Storage* p, const typename D::Storage* q, int64_t count) {
    Int far{};
    for (int64_t j = 0; j < count; j += WIDTH) {
        Vec u = difference(load_upto<D>(p + j, count - j), load_upto<D>(q + j, count - j));
        far |= !((u <= NEAR) & (u >= -NEAR));
    }
    for (int i = 0; i < WIDTH; i++)
        if (far[i]) return false;
    return true;
}

template <class D, class Sum>
static void add_near_block(Pair& row, const typename D::Storage* p, const typename D::Storage* q, int64_t count) {
    Vec cq = splat(row.q.centre());
    Sum sum, slope, curve;
    for (int64_t j = 0; j < count;) {
        int64_t stop = j + GROUP * WIDTH < count ? j + GROUP * WIDTH : count;
        ask_ahead(p + j), ask_ahead(q + j);
        for (; j < stop; j += WIDTH) {
            Vec y = load_upto<D>(q + j, count - j), u = difference(load_upto<D>(p + j, count - j), y);
            Vec e = exponential(y - cq);
            sum.add(e);
            slope.add(e * u);
            curve.add(e * curvature(u, splat(1.0f)));
        }
        sum.finish(), slope.finish(), curve.finish();
    }
    row.q.sum += sum.total();
    row.slope += slope.total();
    row.curve += curve.total();
}

// exp(x - c), c not less than x. A float32 difference is rounded by half an ulp of itself, which a log-ratio of thousands
// multiplies: what it lost is found (Knuth's two-sum) and multiplied in. Of half precision it loses nothing that counts.
template <class D>
static inline Vec exponential_of_difference(Vec x, Vec c) {
    if constexpr (sizeof(typename D::Storage) == 2) return exponential(x - c);
    Vec d = x - c, back = d - x, lost = (x - (d - back)) - (c + back), y = exponential(d);
    return d > -110.f ? y * lost + y : y;  // of -inf what was lost is NaN
}

template <class D, class Sum>
static void add_block(Pair& row, const typename D::Storage* p, const typename D::Storage* q, int64_t count) {
    Vec cp = splat(row.p.centre()), cq = splat(row.q.centre());
    Sum sp, sq, cross;
    auto add = [&](Vec x, Vec y) {
        Vec dp = x - cp, dq = y - cq, eq = exponential_of_difference<D>(y, cq);
        sp.add(exponential(dp));
        sq.add(eq);
        // exp(-745) is the last teacher mass that float64 knows; below it even a student of -inf costs nothing
        cross.add(dq > -745.0f ? eq * (dq - dp) : Vec{});
    };
    for (int64_t j = 0; j < count;) {
        int64_t stop = j + GROUP * WIDTH;
        if (stop <= count) {
            ask_ahead(p + j), ask_ahead(q + j);
            for (; j < stop; j += 2 * WIDTH) {
                Two x = load_two<D>(p + j), y = load_two<D>(q + j);
                add(x.a, y.a);
                add(x.b, y.b);
            }
        } else {
            for (; j < count; j += WIDTH) add(load_upto<D>(p + j, count - j), load_upto<D>(q + j, count - j));
        }
        sp.finish(), sq.finish(), cross.finish();
    }
    row.p.sum += sp.total();
    row.q.sum += sq.total();
    row.cross += cross.total();
}

// A small number is lost beside a large one of its group. Whether what a lane can so lose, half an ulp of the block's
// largest exponential at every addition, is more than a quarter of an ulp of the row's sum so far.
static inline bool needs_care(const Side& side, float block_top) {
    return !(2.0 * GROUP * std::exp((double)block_top - side.maximum) <= side.sum);
}

template <class D>
static Pair pair_sums(const typename D::Storage* p, const typename D::Storage* q, int64_t V) {
    Pair row;
    for (int64_t start = 0; start < V; start += BLOCK, p += BLOCK, q += BLOCK) {
        int64_t count = V - start < BLOCK ? V - start : BLOCK;
        if (row.near && !block_is_near<D>(p, q, count)) {
            row.finish();
            row.near = false;
        }
        float top_p = block_maximum<D>(p, count), top_q = block_maximum<D>(q, count);
        row.raise_p(top_p);
        row.raise_q(top_q);
        bool careful = needs_care(row.q, top_q) || (!row.near && needs_care(row.p, top_p));
        auto add = row.near ? (careful ? add_near_block<D, CarefulSum> : add_near_block<D, QuickSum>)
                            : (careful ? add_block<D, CarefulSum> : add_block<D, QuickSum>);
        add(row, p, q, count);
    }
    if (row.near) row.finish();
    return row;
}

// KL(q || p) in nats from a row's sums; exactly 0 for identical rows.
static inline double forward_kl(const Pair& row) {
    double cross = row.cross, kl;
    if (row.near) {
        double x = (row.slope + row.curve) / row.q.sum;
        kl = row.curve / row.q.sum + (std::log1p(x) - x);
    } else {
        if (cross != cross && row.p.usable() && row.q.usable()) return INF;  // 0 * inf: mass that float32 cannot hold
        kl = cross / row.q.sum - row.q.log_sum() + row.p.log_sum();
    }
    return kl < 0 ? 0 : kl;
}

// How a row is written: straight to memory where the destination is aligned and is not about to be read.
template <bool STREAM, class Packed>
static inline void write(void* to, Packed packed) {
#if defined(__AVX512F__)
    if constexpr (STREAM && sizeof packed == 64) return _mm512_stream_ps((float*)to, (__m512)packed);
#endif
#if defined(__AVX__)
    if constexpr (STREAM && sizeof packed == 32) return _mm256_stream_ps((float*)to, (__m256)packed);
    if constexpr (STREAM && sizeof packed == 16) return _mm_stream_si128((__m128i*)to, (__m128i)packed);
#endif
    std::memcpy(to, &packed, sizeof packed);
}

template <class D, bool STREAM>
static inline void write_two(typename D::Storage* to, Two x) {
    if constexpr (D::INTERLEAVED) {
        write<STREAM>(to, D::narrow(x));
    } else {
        write<STREAM>(to, D::narrow(x.a));
        write<STREAM>(to + WIDTH, D::narrow(x.b));
    }
}

static inline void drain() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

// Writes f(p, q) of every entry of two rows, last block first: that is the part still in the cache.
template <class D, bool STREAM, class F>
static void write_row_as(const typename D::Storage* p, const typename D::Storage* q, typename D::Storage* out, int64_t V,
                         F f) {
    const int64_t whole = V / (2 * WIDTH) * (2 * WIDTH);
    for (int64_t j = whole; j < V; j += WIDTH) {
        const int left = V - j < WIDTH ? (int)(V - j) : WIDTH;
        store_part<D>(out + j, f(load_part<D>(p + j, left), load_part<D>(q + j, left)), left);
    }
    for (int64_t end = whole; end > 0;) {
        int64_t start = (end - 1) / BLOCK * BLOCK;
        for (int64_t j = start; j < end; j += 2 * WIDTH) {
            ask_before(p + j), ask_before(q + j);
            Two x = load_two<D>(p + j), y = load_two<D>(q + j);
            write_two<D, STREAM>(out + j, {f(x.a, y.a), f(x.b, y.b)});
        }
        end = start;
    }
}

template <class D, class F>
static void write_row(const typename D::Storage* p, const typename D::Storage* q, typename D::Storage* out, int64_t V, F f) {
    bool stream = out != p && (uintptr_t)out % 64 == 0 && V * sizeof *out > (1 << 15);
    if (stream) {
        write_row_as<D, true>(p, q, out, V, f);
        drain();
    } else {
        write_row_as<D, false>(p, q, out, V, f);
    }
}

// a softmax(p) - b softmax(q), and `at_action` more at the action taken.
struct Coefficients {
    double student, teacher, action;
};

static inline Vec factor(double x) { return splat(x == x ? (float)x : NAN); }

// Whether w p - w q in float32 has the digits of half precision: where the two sides' largest probabilities differ, so does
// some entry by as much, and what is lost, an ulp of those, is small beside it. Two sides that are sure of one token do not.
static inline bool differ_enough(const Pair& row) {
    double p = 1 / row.p.sum, q = 1 / row.q.sum;
    return std::fabs(p - q) > (p > q ? p : q) / 256;
}

// w (p - q) from log p - log q where that is small, so that what the two have in common does not cancel.
template <class D>
static void difference_row(const typename D::Storage* p, const typename D::Storage* q, typename D::Storage* out,
                           int64_t V, const Pair& row, double weight) {
    Vec cp = splat(row.p.maximum), cq = splat(row.q.maximum);
    Vec wp = factor(weight / row.p.sum), wq = factor(weight / row.q.sum);
    if (row.near) {
        Vec shift = factor(row.shift());
        write_row<D>(p, q, out, V, [=](Vec x, Vec y) {
            return wq * exponential(y - cq) * exponential_minus_one(difference(x, y) - shift);
        });
    } else {
        Vec shift = factor(row.p.log_sum() - row.q.log_sum());
        write_row<D>(p, q, out, V, [=](Vec x, Vec y) {
            Vec dp = x - cp, dq = y - cq, ratio = dp - dq - shift;
            Vec teacher = wq * exponential(dq), plain = wp * exponential(dp) - teacher;
            return (ratio < 0.5f) & (ratio > -0.5f) ? teacher * exponential_minus_one(ratio) : plain;
        });
    }
}

template <class D>
static void gradient_row(const typename D::Storage* p, const typename D::Storage* q, typename D::Storage* out, int64_t V,
                         int64_t action, const Pair& row, Coefficients c) {
    if (c.student == 0 && c.teacher == 0 && c.action == 0) {
        std::memset(out, 0, V * sizeof *out);
        return;
    }
    if (action < 0 || action >= V) c.action = 0, action = 0;  // not validated: its log-probability is NaN already
    double ep = std::exp(load_one<D>(p + action) - (double)row.p.maximum) / row.p.sum;
    double eq = c.teacher == 0 ? 0 : std::exp(load_one<D>(q + action) - (double)row.q.maximum) / row.q.sum;
    if (c.student == c.teacher && (sizeof *out == sizeof(float) || row.near || !differ_enough(row))) {
        difference_row<D>(p, q, out, V, row, c.teacher);
        if (c.action != 0) store_one<D>(out + action, c.student * ep - c.teacher * eq - c.action);
        return;
    }
    Vec a = factor(c.student / row.p.sum), b = factor(c.teacher / row.q.sum);
    Vec cp = splat(row.p.maximum), cq = splat(row.q.maximum);
    if (c.teacher == 0) {
        write_row<D>(p, p, out, V, [=](Vec x, Vec) { return a * exponential(x - cp); });
    } else {
        write_row<D>(p, q, out, V, [=](Vec x, Vec y) { return a * exponential(x - cp) - b * exponential(y - cq); });
    }
    if (c.action != 0) store_one<D>(out + action, c.student * ep - c.teacher * eq - c.action);
}
