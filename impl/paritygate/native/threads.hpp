// Units of work shared among threads. By pthread and not <thread>, whose headers take longer to read than a kernel.
#pragma once
#include <cstdint>
#include <pthread.h>

template <class Work>
struct Sharing {
    const Work& work;
    int64_t units, next;

    static void* run(void* shared) {
        auto& x = *(Sharing*)shared;
        for (int64_t i; (i = __atomic_fetch_add(&x.next, 1, __ATOMIC_RELAXED)) < x.units;) x.work(i);
        return nullptr;
    }
};

// work(i) of every unit, on `threads` of them, the caller's included; on fewer where no more are to be had.
template <class Work>
static void share_units(int64_t units, int64_t threads, const Work& work) {
    static constexpr int64_t MOST = 256;
    pthread_t others[MOST];
    Sharing<Work> shared{work, units, 0};
    if (threads > units) threads = units;
    int64_t started = 0;
    while (started + 1 < threads && started < MOST && !pthread_create(others + started, nullptr, shared.run, &shared))
        started++;
    shared.run(&shared);
    while (started) pthread_join(others[--started], nullptr);
}

// How many threads pay: `size` is about how many multiplications there are, and a thread starts in the time of a million.
static inline int64_t threads_for(int64_t threads, int64_t size) {
    return threads < 1 + (size >> 20) ? threads : 1 + (size >> 20);
}
