// What the kernels are asked, as __init__.py lays it out, and how its rows are shared among threads.
#pragma once
#include "rows.hpp"
#include "threads.hpp"

#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

static constexpr int64_t CHUNK = 4;  // rows that a thread takes at a time

struct Problem {
    int32_t dtype, threads;
    const void *student, *teacher;
    void* out;                                      // null: statistics alone
    int64_t student_stride, teacher_stride, out_stride, rows, vocabulary, action_count;
    const int64_t *actions, *starts;                // (N,), (A + 1,): rows starts[i] .. starts[i + 1] are action i
    const uint8_t* success;                         // (A,) of the action's episode
    const double* weights;                          // (A,) 1 / (tokens x actions x episodes), times any outer gradient
    double log_tau0, floor_weight;
    double* statistics;                             // (N, COLUMNS)
    double* logprobs;                               // (A, 2) student, teacher
    uint8_t* gate;                                  // (A,)
};

struct Span {
    int64_t first, last, action;
};

// Rows never share a sum, so who takes which changes no bit of the result.
template <class Work>
static void each_of(const std::vector<Span>& spans, int threads, const Work& work) {
    share_units(spans.size(), threads, [&](int64_t i) { work(spans[i]); });
}

static void split(std::vector<Span>& spans, int64_t first, int64_t last, int64_t action) {
    for (; first < last; first += CHUNK) spans.push_back({first, first + CHUNK < last ? first + CHUNK : last, action});
}

// Fresh memory arrives 4 KiB at a time unless huge pages are asked for; faulting it costs as much as filling it.
static void expect_to_fill(void* from, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21;
    uintptr_t first = ((uintptr_t)from + page - 1) / page * page, last = ((uintptr_t)from + bytes) / page * page;
    if (last > first + 2 * page) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

