// Packed rows of sequences that may begin alike, through every layer and back: the bits of layers.hpp forward, and what
// of a gradient reaches the adapter's A and B. Included by products.cpp.
#pragma once

struct Training {
    Pass pass;                  // rows (count, hidden): going in and coming out, or the gradient of what came out
    const float* const* pairs;  // (layers, PRODUCTS, 2): A (rank, inputs) and B (outputs, rank), null: not adapted
    float* const* gradients;    // alike
    float* inputs;              // (layers, count, hidden), or null: nothing goes back
    float* kept;                // (layers, kept), or (kept) with `recompute`
    const int64_t* lengths;     // rows that all sequences begin with, then what each adds
    int64_t sequences, rank, recompute;
    double scale;
};

struct Kept {  // of a layer, besides its input; each (count, ...)
    float *lows[PRODUCTS], *query, *key, *value, *mixed, *middle, *gate, *up;
};

static int64_t whole_rank(const Training& x) { return (x.rank + PANEL - 1) / PANEL * PANEL; }

// Where a layer's numbers lie from `at`; how many they are.
static int64_t lay(const Training& x, float* at, Kept& to) {
    const Pass& p = x.pass;
    int64_t size = 0;
    const auto next = [&](int64_t columns) {
        float* start = at + size;
        size += (p.count * columns + 15) / 16 * 16;
        return start;
    };
    for (float*& low : to.lows) low = next(whole_rank(x));
    to.query = next(p.heads * p.dim), to.key = next(p.kv_heads * p.dim), to.value = next(p.kv_heads * p.dim);
    to.mixed = next(p.heads * p.dim), to.middle = next(p.hidden), to.gate = next(p.inner), to.up = next(p.inner);
    return size;
}

// to (columns, rows) = from (rows, columns) times scale; rows lie `from_row` and `to_row` apart.
static void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, double scale, float* to,
                      int64_t to_row) {
    for (int64_t i = 0; i < rows; i += 4)
        for (int64_t j = 0; j < columns; j += 4) {
            if (scale == 1 && i + 4 <= rows && j + 4 <= columns) {
                turn_square(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
                continue;
            }
            for (int64_t k = i; k < least(i + 4, rows); k++)
                for (int64_t l = j; l < least(j + 4, columns); l++) to[l * to_row + k] = from[k * from_row + l] * (float)scale;
        }
}

// c (rows, columns) = a (rows, depth) times b (depth, columns), `block` terms at a time; added to c with `more`.
static void general(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row, int64_t rows,
                    int64_t columns, int64_t depth, int64_t block, bool more, int64_t threads) {
    const int64_t panels = columns / PANEL;
    share((rows + ROWS - 1) / ROWS * panels, threads, rows * columns * depth, [&](int64_t unit) {
        const int64_t first = unit / panels * ROWS, column = unit % panels * PANEL;
        for (int64_t k = 0; k < depth; k += block)
            tiles<Single, 2>(a + first * a_row + k, a_row, b + k * b_row + column, b_row, c + first * c_row + column, c_row,
                             least(ROWS, rows - first), least(block, depth - k), more || k > 0);
    });
}

// The transposed weight, laid out in memory that the next call uses again.
static Weight turned(const Pass& x, const Weight& weight) {
    static thread_local Memory data_of;
    const int64_t columns = weight.kind == 2 ? 32 : PANEL, panels = (weight.inputs + columns - 1) / columns;
    const int64_t pairs = weight.kind == 2 ? (weight.outputs + 31) / 32 * 16 : weight.outputs / 2;
    if (weight.kind == 0) {
        float* to = data_of.of(panels * weight.outputs * PANEL);
        turn_singles((const float*)weight.data, weight.inputs, weight.outputs, x.threads, to);
        return {to, weight.outputs, weight.inputs, panels, 0, 0};
    }
    uint16_t* to = data_of.of<uint16_t>(panels * pairs * columns * 2);
    if (2 * pairs != weight.outputs) std::memset(to, 0, panels * pairs * columns * 2 * sizeof *to);
    turn_pairs((const uint16_t*)weight.data, weight.inputs, weight.outputs, weight.kind == 2 ? weight.steps * 16 : weight.inputs / 2,
               pairs, columns, x.threads, to);
    return {to, weight.outputs, weight.inputs, panels, weight.kind, pairs / 16};
}

// Rows through a layer's product, its bias and the adapter, whose product with A is kept in `low`.
static void learning(const Training& x, int64_t index, int which, const float* rows, float* low, float* out) {
    static thread_local Memory a_of, b_of;
    const Pass& p = x.pass;
    const Weight& weight = p.layers[index].weights[which];
    frozen(p, index, which, rows, p.count, out);
    const float *const* pair = x.pairs + 2 * (index * PRODUCTS + which);
    if (!pair[0]) return;
    const int64_t wide = whole_rank(x);
    float *a = a_of.of(wide * weight.inputs), *b = b_of.of(weight.outputs * x.rank);
    turn(pair[0], x.rank, weight.inputs, a), turn(pair[1], weight.outputs, x.rank, b);
    const Linear product{rows, a, low, p.count, weight.inputs, weight.inputs, wide / PANEL, 0, p.threads, 0};
    linear(&product);
    add_low_rank(low, wide, p.count, b, x.rank, weight.outputs, x.scale, p.threads, out);
}

// The gradient of what `learning` gave, to B and, where `into` is no null, to its rows; `low` (count, whole rank) becomes
// that of rows A^T, `more`: it is added to `into`.
static void back(const Training& x, int64_t index, int which, const float* grads, const float* kept_low, float* low,
                 float* into, bool more) {
    static thread_local Memory turned_of, b_of, padded_of;
    const Pass& p = x.pass;
    const Weight& weight = p.layers[index].weights[which];
    const int64_t wide = whole_rank(x), outputs = weight.outputs;
    if (into) multiply(p, turned(p, weight), grads, outputs, p.count, into, more);
    const float *const* pair = x.pairs + 2 * (index * PRODUCTS + which);
    if (!pair[0]) return;
    const float* b = pair[1];
    if (wide != x.rank) {
        float* padded = padded_of.of(outputs * wide);
        std::memset(padded, 0, outputs * wide * sizeof(float));
        for (int64_t row = 0; row < outputs; row++) std::memcpy(padded + row * wide, b + row * x.rank, x.rank * sizeof(float));
        b = padded;
    }
    general(grads, outputs, b, wide, low, wide, p.count, wide, outputs, DEPTH, false, p.threads);
    if (x.scale != 1)
        each_vector(low, low, p.count * wide, p.threads, [&](Vec a, Vec) { return a * (float)x.scale; });
    if (into) general(low, wide, pair[0], weight.inputs, into, weight.inputs, p.count, weight.inputs, x.rank, DEPTH, true, p.threads);
    float *low_turned = turned_of.of(x.rank * p.count), *b_turned = b_of.of(x.rank * outputs);
    transpose(kept_low, wide, p.count, x.rank, x.scale, low_turned, p.count);
    general(low_turned, p.count, grads, outputs, b_turned, outputs, x.rank, outputs, p.count, ROWS, false, p.threads);
    transpose(b_turned, outputs, x.rank, outputs, 1, x.gradients[2 * (index * PRODUCTS + which) + 1], x.rank);
}

// To A: what `back` left in `low`, and the rows that went in.
static void back_to_a(const Training& x, int64_t index, int which, const float* low, const float* rows) {
    static thread_local Memory turned_of;
    const int64_t place = 2 * (index * PRODUCTS + which), inputs = x.pass.layers[index].weights[which].inputs;
    if (!x.pairs[place]) return;
    float* turned = turned_of.of(x.rank * x.pass.count);
    transpose(low, whole_rank(x), x.pass.count, x.rank, 1, turned, x.pass.count);
    general(turned, x.pass.count, rows, inputs, x.gradients[place], inputs, x.rank, inputs, x.pass.count, ROWS, false, x.pass.threads);
}

// Sequences' keys and values, each sequence's end to end, and rows rotated as attention takes them.
struct Attended {
    float *query, *key;      // (count, heads, dim), (count, kv_heads, dim)
    Span *spans, *gradients; // of each sequence with rows, keys and values of its own
    int64_t span_count, shared;
};

static Attended attended(const Training& x, int64_t index, const Kept& k) {
    static thread_local Memory query_of, key_of, spans_of, cache_of, places_of;
    const Pass& p = x.pass;
    const Layer& layer = p.layers[index];
    const int64_t wide = p.heads * p.dim, narrow = p.kv_heads * p.dim, shared = x.lengths[0];
    Attended to{query_of.of(p.count * wide), key_of.of(p.count * narrow), spans_of.of<Span>(2 * x.sequences), nullptr, 0, shared};
    to.gradients = to.spans + x.sequences;
    int64_t* places = places_of.of<int64_t>(p.count);
    for (int64_t i = 0; i < p.count; i++) places[i] = i;
    const float *query = k.query, *key = k.key;
    if (layer.queries.weight) normalized(p, layer.queries, k.query, p.count * p.heads, p.dim, to.query), query = to.query;
    if (layer.keys.weight) normalized(p, layer.keys, k.key, p.count * p.kv_heads, p.dim, to.key), key = to.key;
    rotate(p, query, p.count, p.heads, places, to.query);
    rotate(p, key, p.count, p.kv_heads, places, to.key);
    int64_t room = 0;
    for (int64_t i = 0; i < x.sequences; i++) room += 4 * ((i ? shared : 0) + x.lengths[i]) * narrow;
    float* at = cache_of.of(room);
    for (int64_t i = 0, row = 0; i < x.sequences; row += x.lengths[i++]) {
        if (!x.lengths[i]) continue;
        const int64_t start = i ? shared : 0, end = start + x.lengths[i], size = end * narrow;
        to.spans[to.span_count] = {at, at + size, end * p.dim, 0, row, start, x.lengths[i]};
        to.gradients[to.span_count++] = {at + 2 * size, at + 3 * size, end * p.dim, 0, row, start, x.lengths[i]};
        at += 4 * size;
    }
    share(to.span_count * p.kv_heads, p.threads, p.count * narrow, [&](int64_t unit) {
        const Span& span = to.spans[unit / p.kv_heads];
        const int64_t head = unit % p.kv_heads;
        const Span parts[] = {{nullptr, nullptr, 0, 0, 0, 0, span.start}, span};
        for (const Span& part : parts) {
            append({to.key, p.dim, narrow}, span.keys + head * span.head, part, head, p.dim);
            append({k.value, p.dim, narrow}, span.values + head * span.head, part, head, p.dim);
        }
    });
    return to;
}

// One key head of one sequence going backward: `grads` (count, heads, dim) of what attention gave, to the queries and to
// the keys and values of `into`.
static void attend_back(const Pass& x, const Attended& a, int64_t unit, float scale, const float* mixed,
                        const float* grads, float* to_query) {
    static thread_local Memory keys_of, values_of, scores_of, slopes_of, small_of, to_keys_of, to_values_of;
    const int64_t head = unit % x.kv_heads, dim = x.dim, group = x.heads / x.kv_heads;
    const Span &span = a.spans[unit / x.kv_heads], &into = a.gradients[unit / x.kv_heads];
    const float *keys = span.keys + head * span.head, *values = span.values + head * span.head;
    const int64_t end = span.start + span.count, all = span.count * group, room = (end + PANEL - 1) / PANEL * PANEL;
    float *key_panels = keys_of.of(room * dim), *value_panels = values_of.of(room * dim);
    float *scores = scores_of.of(QUERIES * room), *slopes = slopes_of.of(QUERIES * room);
    float *queries = small_of.of(5 * QUERIES * dim), *turned_queries = queries + QUERIES * dim;
    float *outer = turned_queries + QUERIES * dim, *turned_outer = outer + QUERIES * dim, *back = turned_outer + QUERIES * dim;
    float *to_keys = to_keys_of.of(room * dim), *to_values = to_values_of.of(room * dim);  // (dim, room)
    std::memset(to_keys, 0, room * dim * sizeof(float)), std::memset(to_values, 0, room * dim * sizeof(float));
    turn(keys, end, dim, key_panels), turn(values, end, dim, value_panels);
    for (int64_t first = 0; first < all; first += QUERIES) {
        const int64_t count = least(QUERIES, all - first), reach = span.start + (first + count - 1) / group + 1;
        const int64_t whole = (reach + PANEL - 1) / PANEL * PANEL;
        const auto place = [&](int64_t i) {
            return ((span.row + (first + i) / group) * x.heads + head * group + (first + i) % group) * dim;
        };
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < dim; d += WIDTH) {
                store<Float32>(queries + i * dim + d, load<Float32>(a.query + place(i) + d) * scale);
                store<Float32>(outer + i * dim + d, load<Float32>(grads + place(i) + d));
            }
        transpose(queries, dim, count, dim, 1, turned_queries, QUERIES);
        transpose(outer, dim, count, dim, 1, turned_outer, QUERIES);
        for (int64_t key = 0; key < reach; key += PANEL) {
            tiles<Single, 2>(queries, dim, key_panels + key * dim, PANEL, scores + key, room, count, dim, false);
            tiles<Single, 2>(outer, dim, value_panels + key * dim, PANEL, slopes + key, room, count, dim, false);
        }
        for (int64_t i = 0; i < count; i++) {
            float *weights = scores + i * room, *slope = slopes + i * room;
            const Vec share_of = broadcast(1 / weigh(weights, span.start + (first + i) / group + 1, whole));
            Vec along = {};
            for (int64_t d = 0; d < dim; d += WIDTH)
                along += load<Float32>(outer + i * dim + d) * load<Float32>(mixed + place(i) + d);
            const Vec mean = broadcast((float)total(along));
            for (int64_t key = 0; key < whole; key += WIDTH) {
                const Vec weight = load<Float32>(weights + key) * share_of;
                store<Float32>(weights + key, weight);
                store<Float32>(slope + key, weight * (load<Float32>(slope + key) - mean));
            }
        }
        mix(slopes, room, keys, dim, count, reach, back);
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < dim; d += WIDTH)
                store<Float32>(to_query + place(i) + d, load<Float32>(back + i * dim + d) * scale);
        for (int64_t key = 0; key < whole; key += PANEL) {
            tiles<Single, 2>(turned_queries, QUERIES, slopes + key, room, to_keys + key, room, dim, count, true);
            tiles<Single, 2>(turned_outer, QUERIES, scores + key, room, to_values + key, room, dim, count, true);
        }
    }
    transpose(to_keys, room, dim, end, 1, into.keys + head * into.head, dim);
    transpose(to_values, room, dim, end, 1, into.values + head * into.head, dim);
}

// Gradients of each sequence's keys and values as those of the rows: what all begin with gets the sum.
static void gather(const Pass& x, const Attended& a, float* to_key, float* to_value) {
    const int64_t narrow = x.kv_heads * x.dim;
    const auto each = [&](const Span& span, int64_t position, int64_t row, bool more) {
        for (int64_t head = 0; head < x.kv_heads; head++)
            for (int64_t d = 0; d < x.dim; d += WIDTH) {
                const int64_t from = head * span.head + position * x.dim + d, to = row * narrow + head * x.dim + d;
                const Vec key = load<Float32>(span.keys + from), value = load<Float32>(span.values + from);
                store<Float32>(to_key + to, more ? load<Float32>(to_key + to) + key : key);
                store<Float32>(to_value + to, more ? load<Float32>(to_value + to) + value : value);
            }
    };
    for (int64_t i = 0; i < a.span_count; i++) {
        const Span& span = a.gradients[i];
        for (int64_t j = 0; j < span.start; j++) each(span, j, j, true);
        for (int64_t j = 0; j < span.count; j++) each(span, span.start + j, span.row + j, false);
    }
}

// Gradients of rotated rows (count, heads, dim) become those of the rows: the transposed rotation.
static void rotate_back(const Pass& x, float* grads, int64_t heads) {
    const int64_t half = x.dim / 2;
    share(x.count, x.threads, 4 * x.count * heads * x.dim, [&](int64_t row) {
        const float *cosine = x.cosines + row * x.dim, *sine = x.sines + row * x.dim;
        for (int64_t head = 0; head < heads; head++) {
            float* at = grads + (row * heads + head) * x.dim;
            for (int64_t d = 0; d < half; d += WIDTH) {
                const Vec a = load<Float32>(at + d), b = load<Float32>(at + half + d);
                store<Float32>(at + d, a * load<Float32>(cosine + d) + b * load<Float32>(sine + half + d));
                store<Float32>(at + half + d, b * load<Float32>(cosine + half + d) - a * load<Float32>(sine + d));
            }
        }
    });
}

static void forward_layer(const Training& x, int64_t index, float* rows, const Kept& k) {
    static thread_local Memory normal_of, act_of, out_of;
    const Pass& p = x.pass;
    const Layer& layer = p.layers[index];
    float *normal = normal_of.of(p.count * p.hidden), *act = act_of.of(p.count * p.inner), *out = out_of.of(p.count * p.hidden);
    const auto plus = [](Vec a, Vec b) { return a + b; };
    normalized(p, layer.before, rows, p.count, p.hidden, normal);
    learning(x, index, QUERY, normal, k.lows[QUERY], k.query);
    learning(x, index, KEY, normal, k.lows[KEY], k.key);
    learning(x, index, VALUE, normal, k.lows[VALUE], k.value);
    const Attended a = attended(x, index, k);
    const Attention attention{{a.query, p.dim, p.heads * p.dim}, {}, {}, k.mixed, a.spans, a.span_count, p.heads,
                              p.kv_heads, p.dim, 0, p.threads, (float)layer.scale};
    attend(&attention);
    learning(x, index, OUTPUT, k.mixed, k.lows[OUTPUT], out);
    each_vector(rows, out, p.count * p.hidden, p.threads, plus);
    std::memcpy(k.middle, rows, p.count * p.hidden * sizeof(float));
    normalized(p, layer.between, rows, p.count, p.hidden, normal);
    learning(x, index, GATE, normal, k.lows[GATE], k.gate);
    learning(x, index, UP, normal, k.lows[UP], k.up);
    gate_silu(k.gate, k.up, p.count * p.inner, p.threads, act);
    learning(x, index, DOWN, act, k.lows[DOWN], out);
    each_vector(rows, out, p.count * p.hidden, p.threads, plus);
}

// `grads` (count, hidden) of what the layer gave become those of its input; of the first layer nobody needs them.
static void backward_layer(const Training& x, int64_t index, const Kept& k, float* grads) {
    static thread_local Memory normal_of, into_of, inner_of, low_of, query_of, key_of, value_of;
    const Pass& p = x.pass;
    const Layer& layer = p.layers[index];
    const int64_t hidden = p.count * p.hidden;
    const float* input = x.inputs + index * hidden;
    float *normal = normal_of.of(hidden), *into = into_of.of(p.count * (p.hidden > p.heads * p.dim ? p.hidden : p.heads * p.dim));
    float *inner = inner_of.of(p.count * p.inner), *low = low_of.of(p.count * whole_rank(x));
    back(x, index, DOWN, grads, k.lows[DOWN], low, inner, false);
    gate_silu_back(k.gate, k.up, inner, p.count * p.inner, p.threads, k.gate, k.up);
    back_to_a(x, index, DOWN, low, inner);
    normalized(p, layer.between, k.middle, p.count, p.hidden, normal);
    back(x, index, GATE, k.gate, k.lows[GATE], low, into, false);
    back_to_a(x, index, GATE, low, normal);
    back(x, index, UP, k.up, k.lows[UP], low, into, true);
    back_to_a(x, index, UP, low, normal);
    normalize_rms_back(k.middle, layer.between.weight, into, p.count, p.hidden, layer.between.epsilon, p.threads, true, grads);
    back(x, index, OUTPUT, grads, k.lows[OUTPUT], low, into, false);
    back_to_a(x, index, OUTPUT, low, k.mixed);
    float *query = query_of.of(p.count * p.heads * p.dim), *key = key_of.of(p.count * p.kv_heads * p.dim);
    float* value = value_of.of(p.count * p.kv_heads * p.dim);
    const Attended a = attended(x, index, k);
    int64_t size = 0;
    for (int64_t i = 0; i < a.span_count; i++) size += a.spans[i].count * (a.spans[i].start + a.spans[i].count);
    share(a.span_count * p.kv_heads, p.threads, 5 * size * p.heads * p.dim,
          [&](int64_t unit) { attend_back(p, a, unit, (float)layer.scale, k.mixed, into, query); });
    gather(p, a, key, value);
    rotate_back(p, query, p.heads), rotate_back(p, key, p.kv_heads);
    const auto through = [&](const Norm& norm, const float* rows, float* at, int64_t count) {
        if (norm.weight) normalize_rms_back(rows, norm.weight, at, count, p.dim, norm.epsilon, p.threads, false, at);
    };
    through(layer.queries, k.query, query, p.count * p.heads), through(layer.keys, k.key, key, p.count * p.kv_heads);
    normalized(p, layer.before, input, p.count, p.hidden, normal);
    const float* three[] = {query, key, value};
    for (int which = QUERY; which <= VALUE; which++) {
        back(x, index, which, three[which], k.lows[which], low, index ? into : nullptr, which != QUERY);
        back_to_a(x, index, which, low, normal);
    }
    if (index) normalize_rms_back(input, layer.before.weight, into, p.count, p.hidden, layer.before.epsilon, p.threads, true, grads);
}

static void forward_of(const Training& x) {
    const int64_t size = x.pass.count * x.pass.hidden;
    Kept kept;
    for (int64_t index = 0; index < x.pass.layer_count; index++) {
        if (x.inputs) std::memcpy(x.inputs + index * size, x.pass.rows, size * sizeof(float));
        const int64_t each = lay(x, x.kept, kept);
        if (!x.recompute) lay(x, x.kept + index * each, kept);
        forward_layer(x, index, x.pass.rows, kept);
    }
}

static void backward_of(const Training& x) {
    static thread_local Memory rows_of;
    const int64_t size = x.pass.count * x.pass.hidden;
    Kept kept;
    for (int64_t index = x.pass.layer_count; index-- > 0;) {
        const int64_t each = lay(x, x.kept, kept);
        if (x.recompute) {
            float* rows = rows_of.of(size);
            std::memcpy(rows, x.inputs + index * size, size * sizeof(float));
            forward_layer(x, index, rows, kept);
        } else {
            lay(x, x.kept + index * each, kept);
        }
        backward_layer(x, index, kept, x.pass.rows);
    }
}
