// SPOD on rows of logits: the statistics of each row and action, the gate, and the analytic gradient (design/080).
#include "problem.hpp"

static constexpr int64_t SHORT_ACTION = 16;  // rows of one action that a thread takes together, gate and gradient at once

// Whether an action is protected, by its episode's success and `diff` = sum over its rows of log q - log p; of -inf:
// whether it may be. inf - inf is NaN: not protected. Obligations: spod/gate, spod/tie; as gate.py.
static inline bool gate(bool success, double diff) { return success && diff < 0; }

template <class D>
struct Spod {
    typedef typename D::Storage T;
    const Problem& x;

    const T* student(int64_t i) const { return (const T*)x.student + i * x.student_stride; }
    const T* teacher(int64_t i) const { return (const T*)x.teacher + i * x.teacher_stride; }
    T* out(int64_t i) const { return (T*)x.out + i * x.out_stride; }

    void measure(int64_t i) const {
        const T *p = student(i), *q = teacher(i);
        Pair row = pair_sums<D>(p, q, x.vocabulary);
        double* s = x.statistics + i * COLUMNS;
        row.save(s);
        bool inside = x.actions[i] >= 0 && x.actions[i] < x.vocabulary;  // unvalidated input may not read past the row
        s[STUDENT_LOGPROB] = inside ? load_one<D>(p + x.actions[i]) - s[STUDENT_MAXIMUM] - row.p.log_sum() : NAN;
        s[TEACHER_LOGPROB] = inside ? load_one<D>(q + x.actions[i]) - s[TEACHER_MAXIMUM] - row.q.log_sum() : NAN;
        s[KL] = forward_kl(row);
    }

    void differentiate(int64_t i, Coefficients c) const {
        Pair row;
        row.load(x.statistics + i * COLUMNS);
        gradient_row<D>(student(i), teacher(i), out(i), x.vocabulary, x.actions[i], row, c);
    }

    bool may_open(int64_t action) const { return gate(x.success[action], -INFINITY); }

    void decide(int64_t action) const {
        double p = 0, q = 0, diff = 0;
        for (int64_t i = x.starts[action]; i < x.starts[action + 1]; i++) {
            double row_p = x.statistics[i * COLUMNS + STUDENT_LOGPROB], row_q = x.statistics[i * COLUMNS + TEACHER_LOGPROB];
            p += row_p, q += row_q, diff += row_q - row_p;  // row by row, so that equal rows tie exactly
        }
        x.logprobs[2 * action] = p;
        x.logprobs[2 * action + 1] = q;
        x.gate[action] = gate(x.success[action], diff);
    }

    Coefficients coefficients(int64_t action) const {
        double w = x.weights[action];
        if (!may_open(action) || !x.gate[action]) return {w, w, 0};
        bool below = x.logprobs[2 * action] < x.log_tau0;
        double floor = below ? w * x.floor_weight : 0;
        return {floor, 0, floor};
    }

    void run() const {
        std::vector<Span> first, second;
        for (int64_t a = 0; a < x.action_count; a++) {
            int64_t from = x.starts[a], to = x.starts[a + 1];
            bool whole = x.out && may_open(a) && to - from <= SHORT_ACTION;
            if (whole) {
                first.push_back({from, to, a});
            } else {
                split(first, from, to, a);
                if (x.out && may_open(a)) split(second, from, to, a);
            }
        }
        each_of(first, x.threads, [&](const Span& span) {
            bool gate_may_open = may_open(span.action);
            if (!x.out || gate_may_open) {
                for (int64_t i = span.first; i < span.last; i++) measure(i);
            } else {
                for (int64_t i = span.first; i < span.last; i++) measure(i), differentiate(i, coefficients(span.action));
            }
            if (x.out && gate_may_open && x.starts[span.action + 1] - x.starts[span.action] <= SHORT_ACTION) {
                decide(span.action);
                for (int64_t i = span.last; i-- > span.first;) differentiate(i, coefficients(span.action));
            }
        });
        for (int64_t a = 0; a < x.action_count; a++) decide(a);
        each_of(second, x.threads, [&](const Span& span) {
            for (int64_t i = span.last; i-- > span.first;) differentiate(i, coefficients(span.action));
        });
    }
};

template <class D>
static void linear(const Problem& x, const double* coefficients) {
    std::vector<Span> spans;
    split(spans, 0, x.rows, 0);
    each_of(spans, x.threads, [&](const Span& span) {
        for (int64_t i = span.first; i < span.last; i++) {
            const double* c = coefficients + 3 * i;
            Spod<D>{x}.differentiate(i, {c[0], c[1], c[2]});
        }
    });
}

extern "C" {

// Statistics, gates and, where `out` is given, the gradient.
void paritygate_spod(const Problem* x) {
    if (x->out && x->out != x->student)
        expect_to_fill(x->out, x->rows * x->out_stride * (x->dtype == 0 ? sizeof(float) : sizeof(uint16_t)));
    if (x->dtype == 0) Spod<Float32>{*x}.run();
    if (x->dtype == 1) Spod<BFloat16>{*x}.run();
    if (x->dtype == 2) Spod<Float16>{*x}.run();
}

// out[i] = c[i, 0] softmax(student[i]) - c[i, 1] softmax(teacher[i]) - c[i, 2] onehot(actions[i]), by the statistics.
void paritygate_linear(const Problem* x, const double* coefficients) {
    if (x->out != x->student)
        expect_to_fill(x->out, x->rows * x->out_stride * (x->dtype == 0 ? sizeof(float) : sizeof(uint16_t)));
    if (x->dtype == 0) linear<Float32>(*x, coefficients);
    if (x->dtype == 1) linear<BFloat16>(*x, coefficients);
    if (x->dtype == 2) linear<Float16>(*x, coefficients);
}

int64_t paritygate_vector_width() { return WIDTH; }
}
