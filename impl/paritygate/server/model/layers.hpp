// Packed rows through every layer of a Llama or a Qwen3, without a gradient: what the modules compute (design/030), in
// the same steps and with the same roundings, but in one call. Included by products.cpp, whose kernels it is made of.
#pragma once

struct Weight {  // as `Panels` holds it
    const void* data;
    int64_t inputs, outputs, panels, kind, steps;  // kind 0: float32, 1: bfloat16 that is widened, 2: AMX tiles
};
struct Pair {  // of low rank, float32; a.data null: this layer is not adapted
    Weight a, b;
    double scale;
};
struct Norm {  // weight null: there is none
    const float* weight;
    double epsilon;
};
enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, PRODUCTS };
struct Layer {
    Weight weights[PRODUCTS];
    const float* biases[PRODUCTS];  // null: none
    Norm before, between, queries, keys;
    double scale;  // of attention's scores
};
struct Range {  // rows that go through the same adapter: pairs (layers, PRODUCTS), or null
    int64_t start, end;
    const Pair* pairs;
};
struct Tiles {  // amx.hpp's Product
    const float* rows;
    const void* weight;
    float* out;
    int64_t count, inputs, steps, panels, outputs, threads;
};
struct Pass {
    float* rows;                   // (count, hidden), going in and coming out
    const float *cosines, *sines;  // (count, dim) of each row's position
    const Layer* layers;
    const Range* ranges;
    const Span* spans;             // in the order of their rows, which they cover
    const int64_t* tails;          // of each span, how many of its last rows come out, those of all spans end to end
    void (*tiled)(const void*, int64_t);
    int64_t count, layer_count, range_count, span_count, hidden, heads, kv_heads, dim, inner, threads, emulated;
};

// The value as it is once it is stored: a compiler would fuse the product into the sum that follows.
static inline Vec rounded(Vec x) {
#if defined(__AVX__)
    asm("" : "+x"(x));
#elif defined(__SSE__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// f(to, from) of every vector of both.
template <class F>
static void each_vector(float* to, const float* from, int64_t size, int64_t threads, F f) {
    const int64_t part = 1 << 14;
    share((size + part - 1) / part, threads, size, [&](int64_t unit) {
        for (int64_t i = unit * part; i < least(size, (unit + 1) * part); i += WIDTH)
            store<Float32>(to + i, f(load<Float32>(to + i), load<Float32>(from + i)));
    });
}

// out (count, outputs) = rows (count, inputs), `stride` apart, times the weight; added to it with `more`.
static void multiply(const Pass& x, const Weight& weight, const float* rows, int64_t stride, int64_t count, float* out,
                     bool more = false) {
    if (weight.kind != 2) {
        const Linear product{rows, weight.data, out, count, weight.inputs, stride, weight.panels, weight.kind, x.threads, more};
        return linear(&product);
    }
    static thread_local Memory sum_of;
    float* sum = more ? sum_of.of(count * weight.outputs) : out;
    const Tiles product{rows, weight.data, sum, count, weight.inputs, weight.steps, weight.panels, weight.outputs, x.threads};
    x.tiled(&product, x.emulated);
    if (more) each_vector(out, sum, count * weight.outputs, x.threads, [](Vec a, Vec b) { return a + b; });
}

// Rows through a layer's product and its bias.
static void frozen(const Pass& x, int64_t index, int which, const float* rows, int64_t count, float* out) {
    const Weight& weight = x.layers[index].weights[which];
    const float* bias = x.layers[index].biases[which];
    multiply(x, weight, rows, weight.inputs, count, out);
    if (bias)
        for (int64_t row = 0; row < count; row++)
            each_vector(out + row * weight.outputs, bias, weight.outputs, 1, [](Vec a, Vec b) { return a + b; });
}

// out (count, outputs) += low (count, inputs), `stride` apart, times b in panels (inputs, PANEL), times scale.
static void add_low_rank(const float* low, int64_t stride, int64_t count, const float* b, int64_t inputs,
                         int64_t outputs, double scale, int64_t threads, float* out) {
    const int64_t group = 8, panels = outputs / PANEL, groups = (panels + group - 1) / group;
    const Vec factor = broadcast((float)scale);
    share((count + ROWS - 1) / ROWS * groups, threads, count * inputs * outputs, [&](int64_t unit) {
        const int64_t first = unit / groups * ROWS, rows = least(ROWS, count - first);
        alignas(64) float delta[ROWS * PANEL];
        for (int64_t panel = unit % groups * group, last = least(panel + group, panels); panel < last; panel++) {
            for (int64_t k = 0; k < inputs; k += DEPTH)
                tiles<Single, 2>(low + first * stride + k, stride, b + (panel * inputs + k) * PANEL, PANEL, delta, PANEL,
                                 rows, least(DEPTH, inputs - k), k > 0);
            for (int64_t row = 0; row < rows; row++)
                for (int64_t i = 0; i < PANEL; i += WIDTH) {
                    float* to = out + (first + row) * outputs + panel * PANEL + i;
                    store<Float32>(to, load<Float32>(to) + rounded(load<Float32>(delta + row * PANEL + i) * factor));
                }
        }
    });
}

// Rows through a layer's product, its bias and its adapters'.
static void adapted(const Pass& x, const Range* ranges, int64_t index, int which, const float* rows, int64_t count,
                    float* out) {
    static thread_local Memory low_of;
    const Weight& weight = x.layers[index].weights[which];
    frozen(x, index, which, rows, count, out);
    for (int64_t i = 0; i < x.range_count; i++) {
        const Range& range = ranges[i];
        const int64_t there = range.end - range.start;
        if (!range.pairs || there <= 0) continue;
        const Pair& pair = range.pairs[index * PRODUCTS + which];
        if (!pair.a.data) continue;
        const int64_t rank = pair.a.panels * PANEL;
        float* low = low_of.of(there * rank);
        multiply(x, pair.a, rows + range.start * weight.inputs, weight.inputs, there, low);
        add_low_rank(low, rank, there, (const float*)pair.b.data, pair.b.inputs, weight.outputs, pair.scale, x.threads,
                     out + range.start * weight.outputs);
    }
}

// Rotary positions of (count, heads, dim), row i by that of row places[i]: the two halves of a head are a plane each.
static void rotate(const Pass& x, const float* rows, int64_t count, int64_t heads, const int64_t* places, float* out) {
    const int64_t half = x.dim / 2;
    share(count, x.threads, 4 * count * heads * x.dim, [&](int64_t row) {
        const float *cosine = x.cosines + places[row] * x.dim, *sine = x.sines + places[row] * x.dim;
        for (int64_t head = 0; head < heads; head++) {
            const float* at = rows + (row * heads + head) * x.dim;
            float* to = out + (row * heads + head) * x.dim;
            for (int64_t d = 0; d < half; d += WIDTH) {
                const Vec a = load<Float32>(at + d), b = load<Float32>(at + half + d);
                store<Float32>(to + d, rounded(a * load<Float32>(cosine + d)) + rounded(-b * load<Float32>(sine + d)));
                store<Float32>(to + half + d, rounded(b * load<Float32>(cosine + half + d)) +
                                                  rounded(a * load<Float32>(sine + half + d)));
            }
        }
    });
}

static void normalized(const Pass& x, const Norm& norm, const float* rows, int64_t count, int64_t columns, float* out) {
    if (norm.weight) normalize_rms(rows, norm.weight, count, columns, norm.epsilon, x.threads, out);
}

static void layers_of(const Pass& x) {
    static thread_local Memory normal_of, query_of, key_of, value_of, mixed_of, gate_of, up_of, out_of;
    static thread_local Memory places_of, spans_of, ranges_of;
    const int64_t wide = x.heads * x.dim, narrow = x.kv_heads * x.dim;
    float *normal = normal_of.of(x.count * x.hidden), *out = out_of.of(x.count * x.hidden);
    float *query = query_of.of(x.count * wide), *mixed = mixed_of.of(x.count * wide);
    float *key = key_of.of(x.count * narrow), *value = value_of.of(x.count * narrow);
    float *gate = gate_of.of(x.count * x.inner), *up = up_of.of(x.count * x.inner);
    int64_t* places = places_of.of<int64_t>(x.count);
    Span* spans = spans_of.of<Span>(x.span_count);
    Range* ranges = ranges_of.of<Range>(x.range_count);
    for (int64_t i = 0; i < x.count; i++) places[i] = i;
    for (int64_t i = 0; i < x.span_count; i++) spans[i] = x.spans[i];
    for (int64_t i = 0; i < x.range_count; i++) ranges[i] = x.ranges[i];
    auto plus = [](Vec a, Vec b) { return a + b; };
    int64_t count = x.count;
    for (int64_t index = 0; index < x.layer_count; index++) {
        const Layer& layer = x.layers[index];
        normalized(x, layer.before, x.rows, count, x.hidden, normal);
        adapted(x, ranges, index, KEY, normal, count, key);
        adapted(x, ranges, index, VALUE, normal, count, value);
        normalized(x, layer.keys, key, count * x.kv_heads, x.dim, key);
        rotate(x, key, count, x.kv_heads, places, key);
        share(x.span_count * x.kv_heads, x.threads, count * narrow, [&](int64_t unit) {
            const Span& span = spans[unit / x.kv_heads];
            const int64_t head = unit % x.kv_heads;
            float *keys = span.keys + index * span.layer + head * span.head, *values = span.values + (keys - span.keys);
            append({key, x.dim, narrow}, keys, span, head, x.dim), append({value, x.dim, narrow}, values, span, head, x.dim);
        });
        if (index + 1 == x.layer_count) {  // nobody reads what comes of the other rows
            int64_t kept = 0;
            for (int64_t i = 0; i < x.span_count; i++) {
                Span& span = spans[i];
                const int64_t first = span.row + span.count - x.tails[i];
                span.start += span.count - x.tails[i], span.count = x.tails[i], span.row = kept;
                for (int64_t row = first; row < first + x.tails[i]; row++) places[kept++] = row;
            }
            for (int64_t i = 0; i < x.range_count; i++) {
                int64_t start = 0, end = 0;
                for (int64_t j = 0; j < kept; j++) start += places[j] < ranges[i].start, end += places[j] < ranges[i].end;
                ranges[i].start = start, ranges[i].end = end;
            }
            for (int64_t i = 0; i < kept; i++) {
                std::memmove(x.rows + i * x.hidden, x.rows + places[i] * x.hidden, x.hidden * sizeof(float));
                std::memmove(normal + i * x.hidden, normal + places[i] * x.hidden, x.hidden * sizeof(float));
            }
            count = kept;
        }
        adapted(x, ranges, index, QUERY, normal, count, query);
        normalized(x, layer.queries, query, count * x.heads, x.dim, query);
        rotate(x, query, count, x.heads, places, query);
        const Attention attention{{query, x.dim, wide}, {}, {}, mixed, spans, x.span_count, x.heads, x.kv_heads, x.dim,
                                  index, x.threads, (float)layer.scale};
        attend(&attention);
        adapted(x, ranges, index, OUTPUT, mixed, count, out);
        each_vector(x.rows, out, count * x.hidden, x.threads, plus);
        normalized(x, layer.between, x.rows, count, x.hidden, normal);
        adapted(x, ranges, index, GATE, normal, count, gate);
        adapted(x, ranges, index, UP, normal, count, up);
        gate_silu(gate, up, count * x.inner, x.threads, gate);
        adapted(x, ranges, index, DOWN, gate, count, out);
        each_vector(x.rows, out, count * x.hidden, x.threads, plus);
    }
}
