// Linear layers and causal attention whose rows do not depend on one another: every number is one chain of sums whose
// order its own row, column and position decide, so batching, tiling and threads change no bit (design/030).
#include "threads.hpp"
#include "vector.hpp"

#include <cstdlib>
#if defined(__AVX512BF16__)
#define DOTS 1
#else
#define DOTS 0
#endif

#define UNROLL _Pragma("GCC unroll 32")

static constexpr int64_t PANEL = 2 * WIDTH;  // columns of a product that are computed together
static constexpr int TILE = WIDTH == 16 ? 12 : 6;  // rows that are: their sums fill the registers
static constexpr int64_t DEPTH = 384;        // terms of a sum before it is added to the sum of those before
static constexpr int64_t BLOCK = 64;         // keys of the attention before theirs is
static constexpr int64_t ROWS = 192;         // rows of a linear layer that share a panel of weights
static constexpr int64_t QUERIES = 4 * TILE;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline Vec broadcast(float x) { return x - Vec{}; }  // unlike `splat` it costs no addition

// Columns of a product's second factor: rows of float32, or pairs of rows of bfloat16, a pair's two numbers side by side.
struct Single {
    typedef float Storage;
    static constexpr int64_t TERMS = 1;
    static void read(const float* from, Vec* columns) { columns[0] = load<Float32>(from); }
};
struct Paired {
    typedef uint32_t Storage;
    static constexpr int64_t TERMS = 2;
    static void read(const uint32_t* from, Vec* columns) {
        const Two both = load_two<BFloat16>((const uint16_t*)from);
        columns[0] = both.a, columns[1] = both.b;
    }
};

// c (R, N * WIDTH) = a (R, depth) times b (depth, N * WIDTH); with `more` it is added to c.
template <class D, int R, int N>
static inline __attribute__((always_inline)) void tile(const float* a, int64_t a_row, const typename D::Storage* b,
                                                       int64_t b_row, float* c, int64_t c_row, int64_t depth,
                                                       bool more) {
    Vec sums[R][N] = {};
    for (int64_t k = 0; k < depth; k += D::TERMS, b += b_row) {
        Vec columns[N][D::TERMS];
        // Few rows wait for the weights: what comes 16 lines later is asked for now.
        if (D::TERMS == 2) UNROLL for (int n = 0; n < N; n++) __builtin_prefetch(b + 16 * b_row + n * WIDTH);
        UNROLL for (int n = 0; n < N; n++) D::read(b + n * WIDTH, columns[n]);
        UNROLL for (int i = 0; i < D::TERMS; i++) UNROLL for (int r = 0; r < R; r++) {
            Vec x = broadcast(a[r * a_row + k + i]);
            UNROLL for (int n = 0; n < N; n++) sums[r][n] = x * columns[n][i] + sums[r][n];
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) {
        float* to = c + r * c_row + n * WIDTH;
        store<Float32>(to, more ? load<Float32>(to) + sums[r][n] : sums[r][n]);
    }
}

template <class D, int R, int N>
static void tile_of(int64_t rows, const float* a, int64_t a_row, const typename D::Storage* b, int64_t b_row, float* c,
                    int64_t c_row, int64_t depth, bool more) {
    if (rows == R) return tile<D, R, N>(a, a_row, b, b_row, c, c_row, depth, more);
    if constexpr (R > 1) tile_of<D, R - 1, N>(rows, a, a_row, b, b_row, c, c_row, depth, more);
}

// Tiles of one size, or the last of 16 rows would be 4, too few chains to keep the processor busy.
template <class D, int N>
static void tiles(const float* a, int64_t a_row, const typename D::Storage* b, int64_t b_row, float* c, int64_t c_row,
                  int64_t rows, int64_t depth, bool more) {
    for (int64_t left = (rows + TILE - 1) / TILE, size; rows > 0; left--, rows -= size, a += size * a_row, c += size * c_row)
        tile_of<D, TILE, N>(size = (rows + left - 1) / left, a, a_row, b, b_row, c, c_row, depth, more);
}

template <class Work>
static void share(int64_t units, int64_t threads, int64_t size, const Work& work) {
    share_units(units, threads_for(threads, size), work);
}

struct Linear {
    const float* rows;   // (count, inputs), `stride` apart
    const void* weight;  // (panels, inputs, PANEL) float32, or (panels, inputs / 2, PANEL, 2) bfloat16
    float* out;          // (count, panels * PANEL), added to with `more`
    int64_t count, inputs, stride, panels, narrow, threads, more;
};

template <class D>
static void linear_of(const Linear& x) {
    const int64_t group = 8, groups = (x.panels + group - 1) / group, columns = x.panels * PANEL;
    share((x.count + ROWS - 1) / ROWS * groups, x.threads, x.count * x.inputs * columns, [&](int64_t unit) {
        int64_t first = unit / groups * ROWS, panel = unit % groups * group;
        int64_t count = least(ROWS, x.count - first);
        for (int64_t last = least(panel + group, x.panels); panel < last; panel++)
            for (int64_t k = 0; k < x.inputs; k += DEPTH) {
                const int64_t depth = least(DEPTH, x.inputs - k);
                const float* from = x.rows + first * x.stride + k;
                const auto* weight = (const typename D::Storage*)x.weight + (panel * x.inputs + k) / D::TERMS * PANEL;
                float* to = x.out + first * columns + panel * PANEL;
                if (D::TERMS == 1 || count <= 2 * TILE) {
                    tiles<D, 2>(from, x.stride, weight, PANEL, to, columns, count, depth, k > 0 || x.more);
                    continue;
                }
                alignas(64) float wide[DEPTH * PANEL];  // widened once for all tiles of rows; the same numbers
                for (int64_t i = 0; i < depth / 2; i++)
                    for (int64_t n = 0; n < PANEL; n += WIDTH) {
                        Vec columns[2];
                        Paired::read((const uint32_t*)weight + i * PANEL + n, columns);
                        store<Float32>(wide + 2 * i * PANEL + n, columns[0]);
                        store<Float32>(wide + (2 * i + 1) * PANEL + n, columns[1]);
                    }
                const char* next = (const char*)(weight + depth / 2 * PANEL);  // asked for beside the products
                const int64_t each = (depth / 2 * PANEL * 4 * TILE + 64 * count - 1) / (64 * count);
                for (int64_t row = 0; row < count; row += TILE) {
                    for (int64_t line = 0; line < each; line++, next += 64) __builtin_prefetch(next, 0, 2);
                    tile_of<Single, TILE, 2>(least(TILE, count - row), from + row * x.stride, x.stride, wide, PANEL,
                                             to + row * columns, columns, depth, k > 0 || x.more);
                }
            }
    });
}

// Products of bfloat16 whose weight lies in panels of pairs of inputs, (panels, pairs, PANEL, 2): a lane of a dot product
// takes two of a chain's terms at a time. The chain is whole, first input to last, however many rows share its weights.
struct Dots {
    const uint16_t* rows;    // (count, 2 * pairs)
    const uint16_t* weight;  // (panels, pairs, PANEL, 2), zeros beyond the last input and the last output
    float* out;              // (count, outputs)
    int64_t count, pairs, panels, outputs, threads;
};

#if DOTS
template <int R>
static void dots_tile(const uint16_t* rows, int64_t pairs, const uint16_t* weight, float* out, int64_t outputs,
                      __mmask32 inside) {
    __m512 sums[R][2];
    UNROLL for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++, weight += 2 * PANEL) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(weight), high = (__m512bh)_mm512_loadu_si512(weight + PANEL);
        UNROLL for (int r = 0; r < R; r++) {
            int32_t pair;
            std::memcpy(&pair, rows + 2 * (r * pairs + k), sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, low);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, high);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        _mm512_mask_storeu_ps(out + r * outputs, (__mmask16)inside, sums[r][0]);
        _mm512_mask_storeu_ps(out + r * outputs + WIDTH, (__mmask16)(inside >> 16), sums[r][1]);
    }
}

template <int R>
static void dots_tiles(int64_t wanted, const uint16_t* rows, int64_t pairs, const uint16_t* weight, float* out,
                       int64_t outputs, __mmask32 inside) {
    if (wanted == R) return dots_tile<R>(rows, pairs, weight, out, outputs, inside);
    if constexpr (R > 1) dots_tiles<R - 1>(wanted, rows, pairs, weight, out, outputs, inside);
}

static void dots_of(const Dots& x) {
    const int64_t group = 8, groups = (x.panels + group - 1) / group;
    share((x.count + ROWS - 1) / ROWS * groups, x.threads, 2 * x.count * x.pairs * x.outputs, [&](int64_t unit) {
        const int64_t first = unit / groups * ROWS, last = least(first + ROWS, x.count);
        int64_t panel = unit % groups * group;
        for (const int64_t end = least(panel + group, x.panels); panel < end; panel++) {
            const int64_t columns = least(PANEL, x.outputs - panel * PANEL);
            const __mmask32 inside = columns < 32 ? (1u << columns) - 1 : ~0u;
            // Tiles of one size, as above.
            int64_t tiles = (last - first + TILE - 1) / TILE;
            for (int64_t row = first, size; row < last; row += size, tiles--) {
                size = (last - row + tiles - 1) / tiles;
                dots_tiles<TILE>(size, x.rows + 2 * row * x.pairs, x.pairs, x.weight + panel * x.pairs * 2 * PANEL,
                                 x.out + row * x.outputs + panel * PANEL, x.outputs, inside);
            }
        }
    });
}
#endif

struct Span {
    float *keys, *values;  // of layer 0: (kv_heads, room, dim), heads and layers as far apart as said
    int64_t head, layer, row, start, count;
};

struct Strided {
    const float* at;
    int64_t head, row;
};

struct Attention {
    Strided queries, keys, values;  // (heads, T, dim), (kv_heads, T, dim); keys null: they are in the cache already
    float* out;                     // (T, heads, dim)
    const Span* spans;
    int64_t span_count, heads, kv_heads, dim, layer, threads;
    float scale;
};

static void append(const Strided& fresh, float* cache, const Span& span, int64_t head, int64_t dim) {
    for (int64_t t = 0; t < span.count; t++)
        std::memcpy(cache + (span.start + t) * dim, fresh.at + head * fresh.head + (span.row + t) * fresh.row,
                    dim * sizeof(float));
}

// Four keys by four dimensions, turned.
static inline void turn_square(const float* from, int64_t from_row, float* to, int64_t to_row) {
    typedef float Four __attribute__((vector_size(16)));
    Four rows[4];
    for (int i = 0; i < 4; i++) std::memcpy(&rows[i], from + i * from_row, sizeof rows[i]);
#if __has_builtin(__builtin_shufflevector)
    Four low = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5), high = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
    Four more = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5), last = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
    rows[0] = __builtin_shufflevector(low, more, 0, 1, 4, 5), rows[1] = __builtin_shufflevector(low, more, 2, 3, 6, 7);
    rows[2] = __builtin_shufflevector(high, last, 0, 1, 4, 5), rows[3] = __builtin_shufflevector(high, last, 2, 3, 6, 7);
    for (int i = 0; i < 4; i++) std::memcpy(to + i * to_row, &rows[i], sizeof rows[i]);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) to[i * to_row + j] = rows[j][i];
#endif
}

// Keys (end, dim) as panels (dim, PANEL), zeros after the last.
static void turn(const float* keys, int64_t end, int64_t dim, float* panels) {
    for (int64_t first = 0; first < end; first += PANEL, panels += dim * PANEL)
        for (int64_t j = 0; j < PANEL; j += 4)
            for (int64_t d = 0; d < dim; d += 4) {
                float *to = panels + d * PANEL + j;
                if (first + j + 4 <= end && d + 4 <= dim) {
                    turn_square(keys + (first + j) * dim + d, dim, to, PANEL);
                    continue;
                }
                for (int64_t i = 0; i < least(4, dim - d); i++)
                    for (int64_t k = 0; k < 4; k++) {
                        int64_t key = first + j + k;
                        to[i * PANEL + k] = key < end ? keys[key * dim + d + i] : 0;
                    }
            }
}

// Scores of the first `length` keys become weights, up to their sum, which is returned; those after up to `reach` zero.
static float weigh(float* scores, int64_t length, int64_t reach) {
    int64_t whole = (length + WIDTH - 1) / WIDTH * WIDTH;
    for (int64_t j = length; j < whole; j++) scores[j] = -INF;
    Vec most = splat(-INF), sum = {};
    for (int64_t j = 0; j < whole; j += WIDTH) most = larger(load<Float32>(scores + j), most);
    Vec top = broadcast(highest(most));
    for (int64_t j = 0; j < whole; j += WIDTH) {
        Vec weight = exponential(load<Float32>(scores + j) - top);
        store<Float32>(scores + j, weight);
        sum += weight;
    }
    for (int64_t j = whole; j < reach; j++) scores[j] = 0;
    return (float)total(sum);
}

// mixed (count, dim) = scores (count, reach), `room` apart, times values (reach, dim).
static void mix(const float* scores, int64_t room, const float* values, int64_t dim, int64_t count, int64_t reach,
                float* mixed) {
    for (int64_t key = 0; key < reach; key += BLOCK) {
        int64_t depth = least(BLOCK, reach - key), d = 0;
        for (; d + PANEL <= dim; d += PANEL)
            tiles<Single, 2>(scores + key, room, values + key * dim + d, dim, mixed + d, dim, count, depth, key > 0);
        if (d == dim) continue;
        for (int64_t i = 0; i < count; i += 4)  // a last single vector of few heads: four kinds of tiles will do
            tile_of<Single, 4, 1>(least(4, count - i), scores + i * room + key, room, values + key * dim + d, dim,
                                  mixed + i * dim + d, dim, depth, key > 0);
    }
}

// What a thread keeps from one piece of work to the next.
struct Memory {
    void* at = nullptr;
    int64_t size = 0;
    ~Memory() { std::free(at); }
    template <class T = float>
    T* of(int64_t wanted) {
        if (wanted * (int64_t)sizeof(T) > size) {
            std::free(at), size = (wanted * sizeof(T) + 63) / 64 * 64, at = std::aligned_alloc(64, size);
            if (!at) std::abort();
        }
        return (T*)at;
    }
};

// One key head of one span: its queries in order of position, `group` of them a token.
static void attend_one(const Attention& x, const Span& span, int64_t head) {
    float *keys = span.keys + x.layer * span.layer + head * span.head, *values = span.values + (keys - span.keys);
    if (x.keys.at) append(x.keys, keys, span, head, x.dim), append(x.values, values, span, head, x.dim);
    const int64_t group = x.heads / x.kv_heads, end = span.start + span.count, dim = x.dim;
    const int64_t room = (end + BLOCK - 1) / BLOCK * BLOCK, all = span.count * group;
    static thread_local Memory panels_of, scores_of, queries_of, mixed_of;
    const bool once = all <= QUERIES;  // then a panel is turned when it is needed, and stays in the cache
    float *panels = panels_of.of((once ? PANEL : room) * dim), *scores = scores_of.of(QUERIES * room);
    float *queries = queries_of.of(QUERIES * dim), *mixed = mixed_of.of(QUERIES * dim);
    if (!once) turn(keys, end, dim, panels);
    for (int64_t first = 0; first < all; first += QUERIES) {
        int64_t count = least(QUERIES, all - first), reach = span.start + (first + count - 1) / group + 1;
        for (int64_t i = 0; i < count; i++) {
            int64_t row = span.row + (first + i) / group, own = head * group + (first + i) % group;
            const float* from = x.queries.at + own * x.queries.head + row * x.queries.row;
            for (int64_t d = 0; d < dim; d += WIDTH)
                store<Float32>(queries + i * dim + d, load<Float32>(from + d) * x.scale);
        }
        for (int64_t key = 0; key < reach; key += PANEL) {
            if (once) turn(keys + key * dim, least(PANEL, end - key), dim, panels);
            tiles<Single, 2>(queries, dim, panels + (once ? 0 : key * dim), PANEL, scores + key, room, count, dim, false);
        }
        float sums[QUERIES];
        for (int64_t i = 0; i < count; i++)
            sums[i] = weigh(scores + i * room, span.start + (first + i) / group + 1, reach);
        mix(scores, room, values, dim, count, reach, mixed);
        for (int64_t i = 0; i < count; i++) {
            float* to = x.out + ((span.row + (first + i) / group) * x.heads + head * group + (first + i) % group) * dim;
            for (int64_t d = 0; d < dim; d += WIDTH)
                store<Float32>(to + d, load<Float32>(mixed + i * dim + d) / sums[i]);
        }
    }
}

extern "C" {

int64_t panel() { return PANEL; }
int64_t width() { return WIDTH; }

// log sum exp of each row of (count, columns).
void normalize(const float* logits, int64_t count, int64_t columns, int64_t threads, float* out) {
    share(count, threads, 4 * count * columns, [&](int64_t row) {
        const float* from = logits + row * columns;
        const int64_t whole = columns / WIDTH * WIDTH, part = columns - whole;
        Vec most = part ? load_part<Float32>(from + whole, part) : splat(-INF);
        for (int64_t i = 0; i < whole; i += WIDTH) most = larger(load<Float32>(from + i), most);
        const Vec top = broadcast(highest(most));
        double sum = part ? total(exponential(load_part<Float32>(from + whole, part) - top)) : 0;
        for (int64_t first = 0; first < whole; first += 4096) {
            Vec terms = {};
            for (int64_t i = first; i < least(first + 4096, whole); i += WIDTH)
                terms += exponential(load<Float32>(from + i) - top);
            sum += total(terms);
        }
        out[row] = (float)(top[0] + std::log(sum));
    });
}

// Rows (count, columns) over the root of their mean square, times `weight` (columns); columns in whole vectors.
void normalize_rms(const float* rows, const float* weight, int64_t count, int64_t columns, double epsilon,
                   int64_t threads, float* out) {
    share(count, threads, count * columns, [&](int64_t row) {
        const float* from = rows + row * columns;
        Vec squares = {};
        for (int64_t i = 0; i < columns; i += WIDTH) squares += load<Float32>(from + i) * load<Float32>(from + i);
        const Vec scale = broadcast((float)(1 / std::sqrt(total(squares) / columns + epsilon)));
        for (int64_t i = 0; i < columns; i += WIDTH)
            store<Float32>(out + row * columns + i, load<Float32>(from + i) * scale * load<Float32>(weight + i));
    });
}

// gate / (1 + exp(-gate)) * up, `size` of them.
void gate_silu(const float* gate, const float* up, int64_t size, int64_t threads, float* out) {
    const int64_t part = 1 << 14;
    share((size + part - 1) / part, threads, 4 * size, [&](int64_t unit) {
        const int64_t end = least(size, (unit + 1) * part);
        for (int64_t i = unit * part; i < end; i += WIDTH) {
            const bool whole = i + WIDTH <= end;
            const int count = (int)(end - i);
            const Vec x = whole ? load<Float32>(gate + i) : load_part<Float32>(gate + i, count);
            const Vec y = whole ? load<Float32>(up + i) : load_part<Float32>(up + i, count);
            const Vec less = exponential(x < 0 ? x : -x);  // no overflow: of what is not above 0
            const Vec product = x * ((x < 0 ? less : splat(1.f)) / (less + 1.f)) * y;
            whole ? store<Float32>(out + i, product) : store_part<Float32>(out + i, product, count);
        }
    });
}

// What `normalize_rms` hands back of gradients (count, columns), to `out`, added to it with `more`.
void normalize_rms_back(const float* rows, const float* weight, const float* grads, int64_t count, int64_t columns,
                        double epsilon, int64_t threads, int64_t more, float* out) {
    share(count, threads, 2 * count * columns, [&](int64_t row) {
        const float *from = rows + row * columns, *grad = grads + row * columns;
        float* to = out + row * columns;
        Vec squares = {}, along = {};
        for (int64_t i = 0; i < columns; i += WIDTH) {
            const Vec x = load<Float32>(from + i);
            squares += x * x, along += load<Float32>(grad + i) * load<Float32>(weight + i) * x;
        }
        const double square = total(squares) / columns + epsilon;
        const Vec scale = broadcast((float)(1 / std::sqrt(square)));
        const Vec part = broadcast((float)(total(along) / columns / square));
        for (int64_t i = 0; i < columns; i += WIDTH) {
            const Vec straight = load<Float32>(grad + i) * load<Float32>(weight + i);
            const Vec back = scale * (straight - load<Float32>(from + i) * part);
            store<Float32>(to + i, more ? load<Float32>(to + i) + back : back);
        }
    });
}

// What `gate_silu` hands back of `grads`: to `gate` and to `up`, which may be those themselves; its product again to
// `grads`.
void gate_silu_back(const float* gate, const float* up, float* grads, int64_t size, int64_t threads, float* to_gate,
                    float* to_up) {
    const int64_t part = 1 << 14;
    share((size + part - 1) / part, threads, 8 * size, [&](int64_t unit) {
        const int64_t end = least(size, (unit + 1) * part);
        for (int64_t i = unit * part; i < end; i += WIDTH) {
            const bool whole = i + WIDTH <= end;
            const int count = (int)(end - i);
            const auto get = [&](const float* from) {
                return whole ? load<Float32>(from + i) : load_part<Float32>(from + i, count);
            };
            const auto put = [&](float* to, Vec value) {
                whole ? store<Float32>(to + i, value) : store_part<Float32>(to + i, value, count);
            };
            const Vec x = get(gate), y = get(up), grad = get(grads);
            const Vec less = exponential(x < 0 ? x : -x), share_of = (x < 0 ? less : splat(1.f)) / (less + 1.f);
            const Vec silu = x * share_of;
            put(to_gate, grad * y * (share_of + silu * (1.f - share_of)));
            put(to_up, grad * silu);
            put(grads, silu * y);
        }
    });
}

// Logits (count, columns) with the log sum exp of each row become -total times their softmax.
void softmax_back(float* logits, const float* normalizers, const float* totals, int64_t count, int64_t columns,
                  int64_t threads) {
    share(count, threads, 4 * count * columns, [&](int64_t row) {
        float* at = logits + row * columns;
        const Vec top = broadcast(normalizers[row]), factor = broadcast(-totals[row]);
        int64_t i = 0;
        for (; i + WIDTH <= columns; i += WIDTH) store<Float32>(at + i, factor * exponential(load<Float32>(at + i) - top));
        const int part = (int)(columns - i);
        if (part) store_part<Float32>(at + i, factor * exponential(load_part<Float32>(at + i, part) - top), part);
    });
}

// Whether products of bfloat16 are dot products here.
int64_t has_dots() {
#if DOTS
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}

void dots(const Dots* x) {
#if DOTS
    dots_of(*x);
#endif
}

// Whether the compiler's machine has AMX tiles: amx.cpp says whether they are used.
int64_t has_tiles() {
#if defined(__linux__) && defined(__x86_64__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
    return 1;
#else
    return 0;
#endif
}

// A weight (outputs, inputs) in panels (panels, inputs, PANEL) of float32 as one of (inputs, outputs).
void turn_singles(const float* from, int64_t inputs, int64_t outputs, int64_t threads, float* to) {
    share((inputs + PANEL - 1) / PANEL, threads, inputs * outputs, [&](int64_t unit) {
        for (int64_t o = 0; o < outputs; o += 4)
            for (int64_t j = 0; j < PANEL; j += 4) {
                const int64_t first = unit * PANEL + j;
                const float* square = from + (o / PANEL * inputs + first) * PANEL + o % PANEL;
                float* there = to + (unit * outputs + o) * PANEL + j;
                if (o + 4 <= outputs && first + 4 <= inputs) {
                    turn_square(square, PANEL, there, PANEL);
                    continue;
                }
                for (int64_t i = 0; i < least(4, outputs - o); i++)
                    for (int64_t k = 0; k < 4; k++)
                        there[i * PANEL + k] = first + k < inputs ? square[k * PANEL + i] : 0;
            }
    });
}

// A weight (outputs, inputs) in panels (panels, pairs, panel, 2) as one of (inputs, outputs), (.., turned, panel, 2).
void turn_pairs(const uint16_t* from, int64_t inputs, int64_t outputs, int64_t pairs, int64_t turned, int64_t panel,
                int64_t threads, uint16_t* to) {
    const int64_t row = 2 * panel;
    share((inputs + panel - 1) / panel, threads, inputs * outputs, [&](int64_t unit) {
        for (int64_t o = 0; o < (outputs + 1) / 2; o++) {
            const uint16_t* two = from + o * 2 / panel * pairs * row + o * 2 % panel * 2;  // outputs 2 o and 2 o + 1
            uint16_t* there = to + (unit * turned + o) * row;
            for (int64_t k = 0; k < panel / 2; k++) {
                const int64_t pair = unit * (panel / 2) + k;
                uint64_t square = 0;
                if (pair < pairs) std::memcpy(&square, two + pair * row, sizeof square);
                // Of four numbers the second and the third change places.
                square = (square & 0xffff00000000ffff) | (square >> 16 & 0xffff0000) | (square & 0xffff0000) << 16;
                std::memcpy(there + 4 * k, &square, sizeof square);
            }
        }
    });
}

void linear(const Linear* x) { x->narrow ? linear_of<Paired>(*x) : linear_of<Single>(*x); }

void attend(const Attention* x) {
    int64_t size = 0;
    for (int64_t i = 0; i < x->span_count; i++)
        size += 2 * x->spans[i].count * (x->spans[i].start + x->spans[i].count) * x->heads * x->dim;
    share(x->span_count * x->kv_heads, x->threads, size,
          [&](int64_t unit) { attend_one(*x, x->spans[unit / x->kv_heads], unit % x->kv_heads); });
}
}

#include "layers.hpp"
#include "training.hpp"

extern "C" {

// The rows of a pass through all its layers.
void layers(const Pass* x) { layers_of(*x); }

// Numbers that a layer of a training pass keeps.
int64_t kept(const Training* x) {
    Kept layer;
    return lay(*x, nullptr, layer);
}

// Rows through all layers, and what of their gradient reaches the adapters.
void forward(const Training* x) { forward_of(*x); }
void backward(const Training* x) { backward_of(*x); }
}
