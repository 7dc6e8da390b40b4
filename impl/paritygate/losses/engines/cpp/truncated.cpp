// SDPO at logit level over the student's k largest entries, the rest as one tail bucket or left out: values, gradients.
// The k largest come from one reading against a threshold that rises; everything after is float64, as in divergence.cpp.
#include "wide.hpp"

#include <algorithm>
#include <functional>

static const double smallest = -std::expm1(-1e-7);  // the tail is never less, see TAIL_CAP of buckets.py

struct Entry {
    float value;
    int32_t at;
};

static bool before(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.at < b.at); }

static inline bool any_nan(Vec a, Vec b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
#else
    return any((a != a) | (b != b));
#endif
}

// The k first of a row in the order of `before`, by index; `usable` is false where the row holds NaN.
template <class D>
struct Largest {
    typedef typename D::Storage T;
    static constexpr int64_t LOOK = 16 * WIDTH;
    std::vector<Entry> found;
    bool usable = true;

    // Of the maxima of stretches of the row the k-th largest is no larger than the row's k-th largest entry.
    Largest(const T* row, int64_t V, int64_t k) {
        std::vector<float> tops;
        for (int64_t start = 0; start < V; start += LOOK) {
            Vec top = splat(-INF);
            bool nan = false;
            int64_t stop = start + LOOK < V ? start + LOOK : V, j = start;
            for (; j + 2 * WIDTH <= stop; j += 2 * WIDTH) {
                Two v = load_two<D>(row + j);
                ask_after(row + j);
                nan |= any_nan(v.a, v.b), top = larger(larger(v.a, v.b), top);
            }
            for (; j < stop; j += WIDTH) {
                Vec v = load_upto<D>(row + j, stop - j);
                nan |= any_nan(v, v), top = larger(v, top);
            }
            if (nan) {
                usable = false;
                return;
            }
            tops.push_back(highest(top));
        }
        float least = -INF;
        if (k <= (int64_t)tops.size()) {
            std::vector<float> order = tops;
            std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<float>());
            least = order[k - 1];
        }
        for (size_t i = 0; i < tops.size(); i++)
            if (tops[i] >= least) take(row, i * LOOK, V, k, least);
        keep(k);
        std::sort(found.begin(), found.end(), [](const Entry& a, const Entry& b) { return a.at < b.at; });
    }

    void keep(int64_t k) {
        std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), before);
        found.resize(k);
    }

    // What is not less than `least` of a stretch; where that becomes much, as of ties, the k first so far are kept.
    void take(const T* row, int64_t start, int64_t V, int64_t k, float least) {
        for (int64_t j = start; j < start + LOOK && j < V; j += WIDTH) {
            int64_t count = V - j < WIDTH ? V - j : WIDTH;
            Vec v = load_upto<D>(row + j, count);
            if (!any(v >= least)) continue;
            for (int64_t l = 0; l < count; l++)
                if (v[l] >= least) found.push_back({v[l], (int32_t)(j + l)});
        }
        if ((int64_t)found.size() > 4 * k + 4 * LOOK) keep(k);
    }
};

// a log(a / b) - a + b with d = log(a / b), whose sum over a row is its KL and has no negative terms; b where a is 0.
static inline Wide excess(Wide a, Wide d, Wide b) {
    Wide y = 1.0 - d * (1. / 7);
    for (int i = 6; i > 2; i--) y = 1.0 - d * (1. / i) * y;
    Wide usual = a * d - a + b, small = a * (d * d * 0.5) * y;
    Wide term = (d < 0.02) & (d > -0.02) ? small : usual;
    return a > 0.0 ? term : b;
}

template <class D>
struct Truncated : WideRows<D> {
    typedef typename D::Storage T;
    using WideRows<D>::x;
    int kind;
    double mixture;  // the teacher's weight a in m = (1 - a) p + a q
    int64_t k;
    bool tail;
    double* saved;   // (N, 4): the divergence, the student's maximum and log sum, the slope of each entry left out over its p
    int32_t* kept;   // (N, k): their indices, ascending
    double* slopes;  // (N, k): and the gradient there

    // The buckets of one side: logits of the k kept; logarithms of their probabilities and the tail's, -inf up to a whole
    // vector; what everything else comes to before the cap.
    struct Side {
        std::vector<double> logit, log;
        double maximum = 0, log_sum = 0, rest = 0, excess = 0;
        bool capped = false;
    };

    void measure(int64_t i) const {
        Largest<D> largest(this->student(i), x.vocabulary, k);
        int32_t* at = kept + i * k;
        double* slope = slopes + i * k;
        if (!largest.usable) {
            for (int64_t b = 0; b < k; b++) at[b] = (int32_t)b, slope[b] = NAN;
            for (int c = 0; c < 4; c++) saved[4 * i + c] = NAN;
            return;
        }
        for (int64_t b = 0; b < k; b++) at[b] = largest.found[b].at;
        Side p, q;
        fill(p, this->student(i), at), fill(q, this->teacher(i), at);
        double rest_p = 0, rest_q = 0;
        if (tail) sum_rest(i, at, p.maximum, rest_p, q.maximum, rest_q);
        normalise(p, rest_p), normalise(q, rest_q);
        compare(p, q, saved + 4 * i, slope);
    }

    void fill(Side& side, const T* row, const int32_t* at) const {
        side.log.assign((k + 1 + LANES - 1) / LANES * LANES, -INFINITY);
        side.logit.resize(k);
        side.maximum = -INFINITY;
        for (int64_t b = 0; b < k; b++) {
            double v = side.logit[b] = side.log[b] = load_one<D>(row + at[b]);
            side.maximum = v > side.maximum ? v : side.maximum;
        }
    }

    // Sums of exponentials over the entries that are not kept, each against its side's maximum over the whole row.
    void sum_rest(int64_t i, const int32_t* at, double top_p, double& rest_p, double& top_q, double& rest_q) const {
        Total of_q;
        of_q.raise(top_q);
        const int32_t *next = at, *end = at + k;
        const T *p = this->student(i), *q = this->teacher(i);
        for (int64_t start = 0; start < x.vocabulary; start += BLOCK) {
            int64_t stop = start + BLOCK < x.vocabulary ? start + BLOCK : x.vocabulary;
            of_q.raise(block_maximum<D>(q + start, stop - start));
            double centre = of_q.maximum == -INFINITY ? 0 : of_q.maximum;
            Wide sum_p{}, sum_q{};
            for (int64_t j = start; j < stop; j += 2 * WIDTH) {
                int64_t count = stop - j < 2 * WIDTH ? stop - j : 2 * WIDTH;
                T others_p[2 * WIDTH], others_q[2 * WIDTH];
                bool some = next < end && *next < j + count;
                if (some) std::memcpy(others_p, p + j, count * sizeof(T)), std::memcpy(others_q, q + j, count * sizeof(T));
                for (; next < end && *next < j + count; next++) others_p[*next - j] = others_q[*next - j] = D::padding();
                this->each_vector(some ? others_p : p + j, some ? others_q : q + j, count, [&](Wide vp, Wide vq) {
                    sum_p += exp_wide(vp - top_p), sum_q += exp_wide(vq - centre);
                });
            }
            rest_p += sum_of(sum_p), of_q.sum += sum_of(sum_q);
        }
        top_q = of_q.maximum, rest_q = of_q.sum;
    }

    void normalise(Side& side, double rest) const {
        Wide kept_sum{};
        for (size_t b = 0; b < side.log.size(); b += LANES) kept_sum += exp_wide(wide_at(&side.log[b]) - side.maximum);
        double sum = sum_of(kept_sum) + rest;
        side.log_sum = std::log(sum);
        for (int64_t b = 0; b < k; b++) side.log[b] = side.log[b] - side.maximum - side.log_sum;
        if (!tail) return;
        side.rest = rest /= sum;
        side.capped = rest < smallest;
        side.excess = side.capped ? smallest - rest : 0;
        side.log[k] = std::log(side.capped ? smallest : rest);
    }

    // log(p_b / q_b) of the buckets less that of the largest, which is returned: from the logits, as in buckets.py.
    double against_largest(const Side& p, const Side& q, std::vector<double>& ratio) const {
        ratio.assign(p.log.size(), 0);
        double of_tail = tail ? p.log[k] - q.log[k] : 0;
        if (tail && p.rest > 0.5) {
            for (int64_t b = 0; b < k; b++) ratio[b] = p.log[b] - q.log[b] - of_tail;
            return of_tail;
        }
        int64_t top = std::max_element(p.logit.begin(), p.logit.end()) - p.logit.begin();
        double largest = p.log[top] - q.log[top];
        for (int64_t b = 0; b < k; b++) ratio[b] = (p.logit[b] - p.logit[top]) - (q.logit[b] - q.logit[top]);
        if (tail) ratio[k] = of_tail - largest;
        return largest;
    }

    // With g = dD/d(bucket) and s = sum_b p_b g_b, entry j has p_j (g_b(j) - s); a capped tail is a constant, g = 0. From
    // every g of the reverse KL `shift` is taken, which changes nothing as long as the p_b sum to 1.
    void compare(const Side& p, const Side& q, double* row, double* slope) const {
        Share of_teacher(kind == JSD ? mixture : 0.5), of_student(kind == JSD ? 1 - mixture : 0.5);
        std::vector<double> weighted(p.log.size()), ratio;
        double shift = kind == REVERSE_KL ? against_largest(p, q, ratio) + 1 : 0;
        Wide whole{}, of_p{}, of_q{};
        for (size_t b = 0; b < p.log.size(); b += LANES) {
            Wide lp = wide_at(&p.log[b]), lq = wide_at(&q.log[b]), mp = exp_wide(lp), mq = exp_wide(lq), g;
            if (kind == FORWARD_KL) {
                whole += excess(mq, lq - lp, mp);
                g = -mq;
            } else if (kind == REVERSE_KL) {
                whole += excess(mp, lp - lq, mq);
                g = mp > 0.0 ? mp * wide_at(&ratio[b]) : Wide{};
            } else {
                Wide mixed = (1 - mixture) * mp + mixture * mq, against = -of_teacher.log_mixed(lq - lp);
                of_p += excess(mp, against, mixed), of_q += excess(mq, -of_student.log_mixed(lp - lq), mixed);
                g = mp > 0.0 ? (1 - mixture) * mp * against : Wide{};
            }
            std::memcpy(&weighted[b], &g, sizeof g);
        }
        if (tail && p.capped) weighted[k] = 0;
        double total = 0;
        for (double w : weighted) total += w;
        // Where the cap acts probabilities sum above 1, and the two excesses are part of the sum that defines the divergence.
        double mixed = (1 - mixture) * p.excess + mixture * q.excess;
        row[0] = kind == FORWARD_KL   ? sum_of(whole) + (q.excess - p.excess)
                 : kind == REVERSE_KL ? sum_of(whole) + (p.excess - q.excess)
                                      : (1 - mixture) * (sum_of(of_p) + (p.excess - mixed)) +
                                            mixture * (sum_of(of_q) + (q.excess - mixed));
        row[1] = p.maximum, row[2] = p.log_sum;
        // Where the teacher excludes what the student may do the divergence is +inf and has no gradient.
        double none = std::isfinite(total + shift) ? 0 : NAN, left_out = p.capped ? shift : 0;
        double of_tail = tail ? weighted[k] / std::exp(p.log[k]) - total - left_out * (1 - p.rest) : 0;
        row[3] = of_tail + none;
        for (int64_t b = 0; b < k; b++) slope[b] = weighted[b] - std::exp(p.log[b]) * (total - left_out * p.rest) + none;
        if (!(p.maximum + q.maximum + p.log_sum + q.log_sum < INFINITY)) row[0] = NAN;
    }

    void differentiate(int64_t i, double scale) const {
        T* out = this->out(i);
        const double *row = saved + 4 * i, top = row[1], log_sum = row[2], outside = scale * row[3];
        if (scale == 0 || (outside == 0 && !tail)) {
            std::memset(out, 0, x.vocabulary * sizeof *out);
        } else if (outside != 0 && this->products_fit(outside, top)) {
            this->write_products(i, outside, top + log_sum, [](Vec, Vec) { return splat(1); });
        } else {
            this->write_wide(i, [=](Wide p, Wide) -> Wide { return outside * exp_wide(p - top - log_sum); });
        }
        for (int64_t b = 0; scale != 0 && b < k; b++) store_one<D>(out + kept[i * k + b], scale * slopes[i * k + b]);
    }

    void run(const uint8_t* row_mask, const double* scale) const {
        this->each_row([&](int64_t i) {
            if (scale)
                differentiate(i, row_mask[i] ? scale[i] : 0);
            else if (row_mask[i])
                measure(i);
        });
    }
};

extern "C" {

// Without `scale` what is saved of the rows of `row_mask`; with it the gradient of sum_i scale_i D_i.
void paritygate_truncated(const Problem* x, int32_t kind, double mixture, int64_t k, int32_t tail, const uint8_t* row_mask,
                          const double* scale, double* saved, int32_t* kept, double* slopes) {
    if (x->out) expect_to_fill(x->out, x->rows * x->out_stride * (x->dtype == 0 ? sizeof(float) : sizeof(uint16_t)));
    auto run = [&](auto dtype) {
        Truncated<decltype(dtype)>{{*x}, kind, mixture, k, tail != 0, saved, kept, slopes}.run(row_mask, scale);
    };
    if (x->dtype == 0) run(Float32{});
    if (x->dtype == 1) run(BFloat16{});
    if (x->dtype == 2) run(Float16{});
}
}
