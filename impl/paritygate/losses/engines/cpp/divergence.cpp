// SDPO at logit level over the full vocabulary: KL(q || p), KL(p || q), the mixture divergence, and their gradients.
// In float64 from the first operation on: a divergence of nearly equal rows, times a mixture weight near 0 or 1, is a
// small difference of large terms whichever way it is written, and these rows are read at memory's pace all the same.
#include "wide.hpp"

template <class D>
struct Divergence : WideRows<D> {
    typedef typename D::Storage T;
    using WideRows<D>::x;
    int kind;
    double mixture;  // the teacher's weight a in m = (1 - a) p + a q
    // (N, 6): the divergence; sum p g of the slopes g that the gradient takes; maximum and log sum of the student, and of the
    // teacher, but of the reverse KL its logit where the student is largest: what a student who is sure of an entry has for
    // a gradient is the difference of that entry's log-ratio and the mean, and both are counted from it.
    double* saved;

    void measure(int64_t i) const {
        // In KL(a || b), cross = sum exp(a - max a) ((a - max a) - (b - b where a is largest)).
        bool forward = kind == FORWARD_KL;
        Total of_a, of_b;
        double cross = 0, there = 0;
        this->each_block(i, [&](const T* p, const T* q, int64_t count, float top_p, float top_q) {
            const T *a = forward ? q : p, *b = forward ? p : q;
            float top_a = forward ? top_q : top_p;
            of_b.raise(forward ? top_p : top_q);
            if (top_a > of_a.maximum) {
                double before = there;
                there = load_one<D>(b + first_of(a, count, top_a));
                if (there == -INFINITY) there = 0;  // and the divergence infinite
                if (of_a.maximum != -INFINITY) cross += of_a.sum * ((of_a.maximum - top_a) - (before - there));
                cross *= of_a.raise(top_a);
            }
            double ca = of_a.maximum == -INFINITY ? 0 : of_a.maximum, cb = of_b.maximum == -INFINITY ? 0 : of_b.maximum;
            Wide sum_a{}, sum_b{}, crossed{};
            this->each_vector(a, b, count, [&](Wide va, Wide vb) {
                Wide da = va - ca, e = exp_wide(da);
                sum_a += e, sum_b += exp_wide(vb - cb);
                crossed += e > 0.0 ? e * (da - (vb - there)) : Wide{};
            });
            of_a.sum += sum_of(sum_a), of_b.sum += sum_of(sum_b), cross += sum_of(crossed);
        });
        double* k = saved + 6 * i;
        (forward ? of_b : of_a).save(k + 2), (forward ? of_a : of_b).save(k + 4);
        if (kind == JSD) return against_mixture(i);
        double kl = cross / of_a.sum - (there - of_b.maximum) - std::log(of_a.sum) + std::log(of_b.sum);
        k[0] = kl < 0 ? 0 : kl;
        if (!of_a.usable() || !of_b.usable()) k[0] = NAN;
        if (kind == REVERSE_KL) k[1] = cross / of_a.sum, k[4] = there;
    }

    static int64_t first_of(const T* row, int64_t count, float value) {
        for (int64_t j = 0; j < count; j += WIDTH) {
            Int equal = load_upto<D>(row + j, count - j) == value;
            for (int l = 0; any(equal); l++)
                if (equal[l]) return j + l;
        }
        return 0;
    }

    void against_mixture(int64_t i) const {
        Share of_teacher(mixture), of_student(1 - mixture);
        double *k = saved + 6 * i, top_p = k[2], log_p = k[3], top_q = k[4], log_q = k[5], p_part = 0, q_part = 0;
        this->each_block(i, [&](const T* p, const T* q, int64_t count, float, float) {
            Wide of_p{}, of_q{};
            this->each_vector(p, q, count, [&](Wide vp, Wide vq) {
                Wide lp = vp - top_p - log_p, lq = vq - top_q - log_q;
                Wide mp = exp_wide(lp), mq = exp_wide(lq);
                of_p -= mp > 0.0 ? mp * of_teacher.log_mixed(lq - lp) : Wide{};
                of_q -= mq > 0.0 ? mq * of_student.log_mixed(lp - lq) : Wide{};
            });
            p_part += sum_of(of_p), q_part += sum_of(of_q);
        });
        double value = (1 - mixture) * p_part + mixture * q_part;
        double sums = top_p + log_p + top_q + log_q;
        k[0] = sums == sums ? (value < 0 ? 0 : value) : NAN;
        k[1] = p_part;
    }

    void differentiate(int64_t i, double scale) const {
        T* out = this->out(i);
        const double *k = saved + 6 * i, top_p = k[2], log_p = k[3], top_q = k[4], log_q = k[5];
        if (scale == 0) {
            std::memset(out, 0, x.vocabulary * sizeof *out);
            return;
        }
        // Where the teacher excludes what the student may do, KL(p || q) is +inf and has no gradient.
        double mean = kind == FORWARD_KL ? 0 : k[1];
        double w = std::isfinite(mean) && (kind != REVERSE_KL || std::isfinite(k[0])) ? (kind == JSD ? scale * (1 - mixture) : scale) : NAN;
        bool close = this->products_fit(w, top_p) && std::fabs(top_q) <= FAR && std::fabs(mean) <= FAR;
        if (kind == REVERSE_KL && close) return of_reverse(i, w);
        Share of_teacher(kind == JSD ? mixture : 0.5);
        this->write_wide(i, [=](Wide p, Wide q) -> Wide {
            Wide dp = p - top_p, dq = q - top_q, lp = dp - log_p, lq = dq - log_q;
            Wide mass = exp_wide(lp), slope;
            if (kind == FORWARD_KL)
                slope = mass - exp_wide(lq);
            else if (kind == REVERSE_KL)
                slope = mass > 0.0 ? mass * ((dp - dq) - mean) : Wide{};
            else
                slope = mass > 0.0 ? mass * (-of_teacher.log_mixed(lq - lp) - mean) : Wide{};
            return w * slope;
        });
    }

    // What rounds in p - q and in what it is counted from is found and taken up again: in float32 the slope, too, keeps
    // its digits where student and teacher nearly agree. Where the student is largest it is the mean alone, to the bit.
    void of_reverse(int64_t i, double w) const {
        const double *k = saved + 6 * i, from = k[2] - k[4];
        const float there = (float)from, below = (float)(from - there), mean = (float)k[1];
        this->write_products(i, w, k[2] + k[3], [=](Vec p, Vec q) {
            return (((p - q) - there) + (lost_in_difference<D>(p, q) - below)) - mean;
        });
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
void paritygate_divergence(const Problem* x, int32_t kind, double mixture, const uint8_t* row_mask, const double* scale,
                           double* saved) {
    if (x->out) expect_to_fill(x->out, x->rows * x->out_stride * (x->dtype == 0 ? sizeof(float) : sizeof(uint16_t)));
    auto run = [&](auto dtype) { Divergence<decltype(dtype)>{{*x}, kind, mixture, saved}.run(row_mask, scale); };
    if (x->dtype == 0) run(Float32{});
    if (x->dtype == 1) run(BFloat16{});
    if (x->dtype == 2) run(Float16{});
}
}
