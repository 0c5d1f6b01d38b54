/* The hot part of the PTX executor: runs of common instructions of one warp.

   native.py compiles this and describes each instruction by a struct op.  Every instruction that is
   rare, or that this access, this operand or a race would make special, is DECLINED before it has
   changed anything: then the reference in Python runs it.  So results are the same, bit by bit.

   The kernel is a stranger's.  Two places keep it away from the memory of this process: check()
   looks at every register, list and target of the table before the first instruction runs, and
   within() at every address. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

#define LANES 32
/* Results of run(): so many basic blocks ran, an instruction is left to Python, no block is here,
   or Python chooses which lanes go on. */
enum { LIMIT, DECLINED, NO_BLOCK, CHOOSE };

struct op {
    s32 code, guard, negated, out, a, b, c, d;
    /* of memory: bytes of an element, elements, whether its sign is extended */
    s32 bytes, count, extend, line;
    s64 immediate;
};

struct shadow {
    s32 *writes, *reads, *atomics, *copies;
    s64 size;
    s32 shift, warps;
};

struct region {
    u64 address, size;
    u8 *data;
    s64 writable;
    struct shadow *shadow;
};

struct events {
    s32 *block, *base, *clock, *line;
    s8 *scope;
    u8 *whole, *copy, *generic;
    s64 count, room;
};

struct launch {
    const struct op *ops;
    const s32 *lists;
    const s64 *ends;
    /* by basic block: whether lanes wait at its start for others of their warp */
    const u8 *gathers;
    s64 *executions;
    struct region *regions;
    s64 region_count;
    struct events *events;
    /* pairs of accesses whose race is known: a hash table of so many keys, a power of two */
    u64 *reported;
    s64 reported_room;
    const u8 *parameters;
    s64 parameter_bytes, stores;
    /* entries of ops and of lists, and rows of the registers' files: of 1, 16, 32 and 64 bits */
    s64 op_count, list_count, rows[4];
};

struct block {
    struct launch *launch;
    u8 *shared;
    s64 shared_bytes;
    struct shadow *shadow;
    s32 *times;
    s32 number, agents;
};

struct warp {
    struct block *block;
    u8 *pred;
    u16 *half;
    u32 *word;
    u64 *wide;
    u8 *local;
    s64 local_bytes;
    /* by instruction: the time and the row of its last event */
    s32 *rows;
    const s32 *seen[LANES];
    s32 length[LANES];
    s32 number, knows;
    s64 pc, at, limit, last, bound;
    /* by block: what all lanes know of it; of no block, if they differ or nobody asked yet */
    const s32 *const *others;
    const s32 *lengths;
    s64 blocks;
    /* whether lanes may part and meet here; whether they are apart, and that is new; whether the
       warp yielded since it jumped back; by lane how often it jumped back then, its position if
       they are apart, and whether it waits at a barrier */
    s32 parts, apart, changed, waited;
    s64 *spins;
    s64 places[LANES];
    u8 mask[LANES], stopped[LANES];
};

#define SHARED_BASE 1024
/* Positions of lanes that have ended are at least this, as in machine.py. */
#define EXIT (1ll << 30)
/* So many jumps back, after which lanes elsewhere go first, as in grid.py. */
#define SPINS 64
#define LOCAL_WINDOW (1ull << 55)
#define SHARED_WINDOW (1ull << 56)
#define FUNCTIONS (1ull << 57)

#ifdef __clang__
#define EACH for (int l = 0; l < LANES; l++)
#else
#define EACH _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)
#endif
#define MOST 1024
/* Strengths of accesses, as in races.py. */
enum { WEAK, BLOCK_SCOPE, CLUSTER_SCOPE, GRID_SCOPE, VOLATILE_SCOPE, UNORDERED };

/* ------------------------------------------------------------------------------------ numbers */

static inline u32 bits_of(f32 v) { u32 b; memcpy(&b, &v, 4); return b; }
static inline f32 float_of(u32 b) { f32 v; memcpy(&v, &b, 4); return v; }
static inline f32 one_nan(f32 v) { return v == v ? v : float_of(0x7FFFFFFF); }
static inline f32 flush(f32 v) {
    u32 b = bits_of(v);
    return (b & 0x7F800000) ? v : float_of(b & 0x80000000);
}
/* What is below 2^-126 when it is rounded to 24 bits is zero: what is below this number before. */
#define LEAST (0x1p-126 - 0x1p-151)
static inline f32 flushed(f32 v, f64 exact) {
    return fabs(exact) < LEAST ? float_of(bits_of(v) & 0x80000000) : v;
}
static inline f32 lesser(f32 a, f32 b) {
    if (a == b) return signbit(a) ? a : b;
    return one_nan(a != a ? b : b != b ? a : a < b ? a : b);
}
static inline f32 greater(f32 a, f32 b) {
    if (a == b) return signbit(a) ? b : a;
    return one_nan(a != a ? b : b != b ? a : a > b ? a : b);
}
static inline u16 to_bf16(f32 v) {
    u32 b = bits_of(v);
    return v != v ? 0x7FFF : (u16)((b + ((b >> 16 & 1) + 0x7FFF)) >> 16);
}
static inline f32 from_bf16(u16 b) { return float_of((u32)b << 16); }
static inline f32 low(u64 pair) { return float_of((u32)pair); }
static inline f32 high(u64 pair) { return float_of(pair >> 32); }
static inline u64 both(f32 first, f32 second) { return bits_of(first) | (u64)bits_of(second) << 32; }
static inline f32 finite_bf16(f32 v) {
    f32 most = float_of(0x7F7F0000);
    return v > most ? most : v < -most ? -most : v;
}
static inline u16 to_f16(f32 v) {
    u32 b = bits_of(v), sign = b >> 16 & 0x8000, size = b & 0x7FFFFFFF;
    if (size > 0x7F800000) return 0x7FFF;
    if (size >= 0x477FF000) return sign | 0x7C00; /* 65520 and more */
    if (size < 0x38800000) { /* below 2^-14: a multiple of 2^-24; the sum rounds */
        return sign | (u16)(bits_of(float_of(size) + 0.5f) - 0x3F000000);
    }
    return sign | (u16)((size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}
static inline f32 from_f16(u16 b) {
    u32 sign = (u32)(b & 0x8000) << 16, size = b & 0x7FFF;
    if (size > 0x7C00) return float_of(0x7FFFFFFF);
    if (size == 0x7C00) return float_of(sign | 0x7F800000);
    return float_of(sign | bits_of(float_of(size << 13) * 0x1p112f));
}
static const f32 E2M1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
static inline u8 to_e2m1(f32 v) {
    f32 size = fabsf(v);
    u8 code = 0;
    if (v != v) return 7;
    for (int n = 0; n < 7; n++) {
        f32 middle = (E2M1[n] + E2M1[n + 1]) / 2;
        code += n & 1 ? size >= middle : size > middle; /* a tie goes to the even code */
    }
    return code | (signbit(v) ? 8 : 0);
}
static inline f32 e4m3(u32 code) { return float_of(code << 20) * 0x1p120f; } /* 0 to 126 */
static u8 to_e4m3(f32 v) {
    f64 size = fabs((f64)v);
    int low = 0, high = 126;
    if (v != v) return 0x7F;
    while (low < high) { /* the nearest one's code; a tie goes to the even code */
        int n = (low + high) / 2;
        f64 middle = ((f64)e4m3(n) + e4m3(n + 1)) / 2;
        if (n & 1 ? size >= middle : size > middle) low = n + 1; else high = n;
    }
    return low | (signbit(v) ? 0x80 : 0);
}
static inline u16 half_of_e4m3(u32 code) {
    u32 size = code & 127;
    return size == 127 ? 0x7FFF : (code & 128) << 8 | to_f16(e4m3(size));
}
static inline u16 half_of_e2m1(u32 code) {
    static const u16 HALVES_OF[8] = {0, 0x3800, 0x3C00, 0x3E00, 0x4000, 0x4200, 0x4400, 0x4600};
    return (code & 8) << 12 | HALVES_OF[code & 7];
}
/* Whether float32 of a float64 depends on its last bits, which functions may differ in. */
static inline int unsure(f64 v) {
    u64 b; memcpy(&b, &v, 8);
    s64 off = (s64)(b & 0x1FFFFFFF) - 0x10000000;
    return (off > -64 && off < 64) || fabs(v) < 0x1p-125;
}

/* -------------------------------------------------------------------------------------- races */

/* The same of an earlier access by another block. */
static int foreign(const struct warp *w, s32 row, s32 index) {
    const struct events *e = w->block->launch->events;
    s32 block = e->block[row], clock = e->clock[row], base = e->base[row];
    if (block >= w->blocks || !w->others[block]) return 1;
    const s32 *seen = w->others[block];
    s32 length = w->lengths[block];
    if (index < length && clock <= seen[index]) return 0;
    if (e->whole[row])
        for (int k = 0; k < LANES && base + k < length; k++)
            if (seen[base + k] >= clock) return 0;
    return 1;
}

/* Whether an access by a lane, or by the whole warp, does not know an earlier one. */
static int late(const struct warp *w, s32 slot, int lane, int whole) {
    const struct events *e = w->block->launch->events;
    s32 row = slot >> 5, clock = e->clock[row], base = e->base[row], index = base + (slot & 31);
    if (!clock) return 0;
    if (e->block[row] != w->block->number) return foreign(w, row, index);
    s32 mine = w->number * LANES;
    if (index == mine + lane) return 0;
    if ((whole || e->whole[row]) && base == mine) return 0;
    for (int l = whole ? 0 : lane; l < (whole ? LANES : lane + 1); l++) {
        const s32 *seen = w->seen[l];
        s32 length = w->length[l];
        if (index < length && clock <= seen[index]) return 0;
        if (e->whole[row])
            for (int k = 0; k < LANES && base + k < length; k++)
                if (seen[base + k] >= clock) return 0;
        if (whole && w->knows == 1) break; /* all lanes know the same */
    }
    return 1;
}

/* Whether two strong accesses are no race: the scope of each includes the other.  As
   Races._forgive_strong, but for clusters; ``written``: both are strong writes. */
static int strong_pair(const struct warp *w, s32 slot, int scope, int written) {
    const struct events *e = w->block->launch->events;
    s32 row = slot >> 5;
    int other = e->scope[row], common = other < scope ? other : scope;
    if (e->block[row] != w->block->number && common < GRID_SCOPE) return 0;
    if (written && (other == UNORDERED || scope == UNORDERED)) return 0;
    return scope && other && common < VOLATILE_SCOPE;
}

/* Tables of earlier accesses, as in races.py; and of places never written. */
enum { WRITES, READS, ATOMICS, COPIES, NEVER };

/* Where the key of a race is, or would be. */
static u64 *reported_at(const struct launch *g, u64 key) {
    u64 most = g->reported_room - 1;
    u64 at = key * 0x9E3779B97F4A7C15ull >> 40 & most;
    while (g->reported[at] && g->reported[at] != key) at = (at + 1) & most;
    return g->reported + at;
}

/* Lines of the two accesses, the table and the memory of the other, whether it is of the same
   warp (1) or of another block (2), and whether another lane of its warp handed over. */
static u64 race_key(u64 line, u64 other, int table, int shared, int relation, int half) {
    return line << 36 | other << 12 | (u64)(table << 8 | shared << 4 | relation << 2 | half << 1 | 1);
}

/* A race is known from now on: 1, or 0 if it was, or if half of the table is full. */
int report(struct launch *g, s64 count, s64 line, s64 other, int table, int shared, int relation,
           int half) {
    if (2 * count >= g->reported_room) return 0;
    u64 key = race_key(line, other, table, shared, relation, half), *at = reported_at(g, key);
    if (*at) return 0;
    *at = key;
    return 1;
}

/* Whether a lane of the warp of an earlier access handed over what it knew then. */
static int handed_over(const s32 *seen, s32 length, s32 base, s32 clock) {
    for (int k = 0; seen && k < LANES && base + k < length; k++)
        if (seen[base + k] >= clock) return 1;
    return 0;
}

/* Whether Python has reported the race of a warp's access with an earlier one. */
static int is_reported(const struct warp *w, const struct shadow *s, s32 slot, int lane, int whole,
                       s32 line, int table) {
    const struct launch *g = w->block->launch;
    const struct events *e = g->events;
    s32 row = slot >> 5;
    if (!g->reported || (whole && w->knows != 1)) return 0;
    int relation = e->block[row] != w->block->number ? 2 : e->base[row] == w->number * LANES;
    int half = !relation && !e->copy[row] &&
               handed_over(w->seen[lane], w->length[lane], e->base[row], e->clock[row]);
    u64 key = race_key(line, e->line[row], table, s->warps > 0, relation, half);
    return *reported_at(g, key) == key;
}

/* The event of an instruction at this time; 0 if there is no room. */
static s32 event(struct warp *w, const struct op *o, int whole) {
    struct block *b = w->block;
    struct events *e = b->launch->events;
    s32 *known = w->rows + 2 * (o - b->launch->ops), time = b->times[w->number];
    if (known[1] && known[0] == time) return known[1];
    if (e->count >= e->room) return 0;
    s32 row = e->count++;
    e->block[row] = b->number;
    e->base[row] = w->number * LANES;
    e->clock[row] = time;
    e->line[row] = o->line;
    e->scope[row] = 0;
    e->whole[row] = whole;
    e->copy[row] = 0;
    e->generic[row] = 1;
    known[0] = time;
    return known[1] = row;
}

/* An access: by n lanes (or places of a whole warp), with their granules. */
struct access {
    int n, whole, parts, count, scope, line;
    u8 lane[LANES];
    s64 offset[LANES];
    s32 place[MOST], slot[MOST];
};

/* The granules of an access that is within the memory of a shadow. */
static void granules(struct access *x, const struct shadow *s, int size) {
    x->parts = size >> s->shift;
    if (x->parts < 1) x->parts = 1;
    x->count = 0;
    for (int k = 0; k < x->n; k++)
        for (int p = 0; p < x->parts; p++) x->place[x->count++] = (x->offset[k] >> s->shift) + p;
}

/* Whether an access does not know one of the earlier ones in a table, and Python has to look. */
static int any_late(const struct warp *w, const struct shadow *s, const struct access *x,
                    const s32 *table, int number, const u8 *matters, int written) {
    for (int k = 0, at = 0; k < x->n; k++)
        for (int p = 0; p < x->parts; p++, at++) {
            s32 slot = table[x->place[at]];
            int lane = x->whole ? 0 : x->lane[k];
            if (slot && (!matters || matters[k]) && late(w, slot, lane, x->whole) &&
                !strong_pair(w, slot, x->scope, written) &&
                !is_reported(w, s, slot, lane, x->whole, x->line, number)) return 1;
        }
    return 0;
}

static int rows_late(const struct warp *w, const struct shadow *s, const struct access *x,
                     const s32 *table, int number, int rows, int written) {
    for (int r = 0; table && r < rows; r++)
        if (any_late(w, s, x, table + r * s->size, number, 0, written)) return 1;
    return 0;
}

/* The slots of an access of this event, and those that a table has at its granules. */
static int fill(struct access *x, const s32 *table, s32 row, s32 *before) {
    int same = 1;
    for (int k = 0, at = 0; k < x->n; k++)
        for (int p = 0; p < x->parts; p++, at++) {
            x->slot[at] = row * LANES + (x->whole ? 0 : x->lane[k]);
            before[at] = table[x->place[at]];
            same &= before[at] == x->slot[at];
        }
    return same;
}

static void put_latest(const struct access *x, s32 *latest, s32 *another) {
    for (int at = 0; at < x->count; at++) latest[x->place[at]] = x->slot[at];
    for (int at = 0; at < x->count; at++)
        if (latest[x->place[at]] != x->slot[at]) another[x->place[at]] = x->slot[at];
}

/* Remember an access, as _note does. */
static void note(const struct warp *w, const struct shadow *s, s32 *table, struct access *x, s32 row) {
    const struct events *e = w->block->launch->events;
    s32 mine = w->number * LANES, before[MOST];
    if (fill(x, table, row, before)) return;
    for (int at = 0; at < x->count; at++) {
        s32 was = before[at];
        if (!was) continue;
        int block = e->block[was >> 5] != w->block->number;
        int warp = block || e->base[was >> 5] != mine;
        if (block) table[3 * s->size + x->place[at]] = was;
        if (warp) table[2 * s->size + x->place[at]] = was;
        if (warp || (was ^ x->slot[at]) & 31) table[s->size + x->place[at]] = was;
    }
    put_latest(x, table, table + s->size);
}

/* Remember a read, as Shadow.note_reads does. */
static void note_read(const struct warp *w, const struct shadow *s, struct access *x, s32 row) {
    s32 before[MOST];
    if (!s->warps) {
        note(w, s, s->reads, x, row);
        return;
    }
    s32 *latest = s->reads + 2 * w->number * s->size, *another = latest + s->size;
    if (fill(x, latest, row, before)) return;
    for (int at = 0; at < x->count; at++)
        if ((before[at] ^ x->slot[at]) & 31) another[x->place[at]] = before[at];
    put_latest(x, latest, another);
}

/* Whether a read of written memory knows all writes before. */
static int ordered_read(const struct warp *w, const struct shadow *s, const struct access *x) {
    const struct launch *g = w->block->launch;
    u64 never = race_key(x->line, 0, NEVER, 1, 0, 0);
    if (s->warps && !(g->reported && *reported_at(g, never) == never))
        for (int at = 0; at < x->count; at++) if (!s->writes[x->place[at]]) return 0;
    return !any_late(w, s, x, s->writes, WRITES, 0, 0) &&
           !rows_late(w, s, x, s->atomics, ATOMICS, 4, 0);
}

/* Whether a write knows all accesses before; ``strong``: with an atomic, or as one. */
static int ordered_write(const struct warp *w, const struct shadow *s, const struct access *x,
                         const u8 *changed, int strong) {
    return !any_late(w, s, x, s->writes, WRITES, changed, 0) &&
           !rows_late(w, s, x, s->reads, READS, s->warps ? 2 * s->warps : 4, 0) &&
           !rows_late(w, s, x, s->atomics, ATOMICS, 4, strong) &&
           !rows_late(w, s, x, s->copies, COPIES, 1, 0);
}

static void note_write(const struct shadow *s, const struct access *x, s32 row) {
    for (int k = 0, at = 0; k < x->n; k++)
        for (int p = 0; p < x->parts; p++, at++)
            s->writes[x->place[at]] = row * LANES + (x->whole ? 0 : x->lane[k]);
}

static int watch_read(struct warp *w, const struct op *o, const struct shadow *s,
                      struct access *x, int size) {
    if (!s || !s->reads || !w->knows) return 0;
    x->line = o->line;
    granules(x, s, size);
    if (!ordered_read(w, s, x)) return 0;
    s32 row = event(w, o, x->whole);
    if (row) note_read(w, s, x, row);
    return row;
}

static int watch_write(struct warp *w, const struct op *o, const struct shadow *s,
                       struct access *x, int size, const u8 *memory, const u8 *rows) {
    u8 changed[LANES];
    if (!s || !w->knows) return 0;
    x->line = o->line;
    granules(x, s, size);
    for (int k = 0; k < x->n; k++)
        changed[k] = memcmp(memory + x->offset[k], rows + k * size, size) != 0;
    /* two lanes that write different values to one place */
    int ascending = 1;
    for (int k = 1; k < x->n; k++) ascending &= x->offset[k - 1] < x->offset[k];
    for (int k = 1; !ascending && !x->whole && k < x->n; k++)
        for (int j = 0; j < k; j++)
            if (x->offset[j] == x->offset[k] && memcmp(rows + j * size, rows + k * size, size))
                return 0;
    if (!ordered_write(w, s, x, changed, 0)) return 0;
    s32 row = event(w, o, x->whole);
    if (row) note_write(s, x, row);
    return row;
}

enum { READ, WRITE, ADD };

/* Whether places are all within the tables of a shadow. */
static int all_in(const struct shadow *s, const s64 *places, s64 count) {
    int outside = 0;
    for (s64 i = 0; i < count; i++) outside |= (u64)places[i] >= (u64)s->size;
    return !outside;
}

/* An access that Python runs, with its event: whether it is in order and was remembered.  ``lanes``
   is null for a whole warp, ``changed`` if every write counts.  OBSERVED: a strong read of what a
   strong write left, which Python remembers. */
int watch(struct warp *w, const struct shadow *s, int kind, s32 row, int scope, s64 n,
          const s64 *lanes, const s64 *offsets, s64 size, const u8 *changed) {
    enum { OBSERVED = 2 };
    struct access x;
    s64 parts = size >> s->shift;
    x.n = n, x.whole = !lanes, x.scope = scope, x.line = w->block->launch->events->line[row];
    if (!w->knows || n < 0 || n > LANES || parts < 0 || parts > MOST / LANES) return 0;
    for (int k = 0; k < n; k++) {
        s64 ends[2] = {offsets[k] >> s->shift, (offsets[k] >> s->shift) + (parts < 1 ? 0 : parts - 1)};
        if (!all_in(s, ends, 2)) return 0;
        x.lane[k] = lanes ? lanes[k] & (LANES - 1) : 0;
        x.offset[k] = offsets[k];
    }
    granules(&x, s, size);
    if (kind == READ) {
        if (!s->reads || !ordered_read(w, s, &x)) return 0;
        note_read(w, s, &x, row);
        if (scope && scope < VOLATILE_SCOPE && s->atomics)
            for (int at = 0; at < x.count; at++) if (s->atomics[x.place[at]]) return OBSERVED;
        return 1;
    }
    if ((kind == ADD && !s->atomics) || !ordered_write(w, s, &x, changed, kind == ADD)) return 0;
    if (kind == WRITE) {
        note_write(s, &x, row);
        return 1;
    }
    note(w, s, s->atomics, &x, row);
    for (int at = 0; s->warps && at < x.count; at++)
        if (!s->writes[x.place[at]]) s->writes[x.place[at]] = x.slot[at];
    return 1;
}

/* ------------------------------------------------------------------------------------- memory */

enum { GLOBAL, SHARED, LOCAL, PARAM, GENERIC };

static inline void copy(u8 *to, const u8 *from, int size) {
    switch (size) {
    case 1: *to = *from; break;
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    default: memcpy(to, from, size);
    }
}

/* Whether so many bytes from an offset on are all within a memory: the one test of addresses. */
static inline int within(u64 offset, u64 size, u64 room) {
    return size <= room && offset <= room - size;
}

/* Whether the bytes of each lane are within a memory that begins at an address, and aligned. */
static int all_within(struct access *x, const u64 *address, u64 first, u64 size, u64 room) {
    for (int k = 0; k < x->n; k++) {
        u64 at = address[k] - first;
        if (!within(at, size, room) || address[k] & (size - 1)) return 0;
        x->offset[k] = at;
    }
    return 1;
}

/* The windows of the generic addresses, and what they are of. */
static const u64 WINDOWS[] = {0, LOCAL_WINDOW, SHARED_WINDOW, FUNCTIONS};
static const int WINDOW_OF[] = {GLOBAL, LOCAL, SHARED};

/* The state space of generic addresses, which become addresses in it; PARAM if Python has to look. */
static int space_of(u64 *address, int n) {
    for (int window = 0; window < 3; window++) {
        u64 first = WINDOWS[window], room = WINDOWS[window + 1] - first;
        if (!within(address[0] - first, 1, room)) continue;
        for (int k = 0; k < n; k++) {
            address[k] -= first;
            if (!within(address[k], 1, room)) return PARAM;
        }
        return WINDOW_OF[window];
    }
    return PARAM;
}

/* Find the bytes of each lane, of a size that is a power of two; false if one is outside,
   misaligned, or in another region. */
static int find(struct warp *w, int space, u64 *address, struct access *x, int size,
                u8 **base, struct shadow **shadow, int write) {
    struct block *b = w->block;
    struct launch *g = b->launch;
    if (!x->n) return 0;
    if (space == GENERIC) space = space_of(address, x->n);
    *shadow = 0;
    if (space == SHARED) {
        if (!all_within(x, address, SHARED_BASE, size, b->shared_bytes)) return 0;
        *base = b->shared;
        *shadow = b->shadow;
        return 1 + SHARED;
    }
    if (space == LOCAL) {
        if (!all_within(x, address, 0, size, w->local_bytes)) return 0;
        for (int k = 0; k < x->n; k++) x->offset[k] += x->lane[k] * w->local_bytes;
        *base = w->local;
        return 1 + LOCAL;
    }
    for (s64 r = 0; space == GLOBAL && r < g->region_count; r++) {
        struct region *one = g->regions + r;
        if (!within(address[0] - one->address, size, one->size)) continue;
        if (write && !one->writable) return 0;
        if (!all_within(x, address, one->address, size, one->size)) return 0;
        *base = one->data;
        if (g->events && one->writable && !(*shadow = one->shadow)) return 0;
        return 1 + GLOBAL;
    }
    return 0;
}

/* The addresses of the active lanes; o->a: the register, o->b: a register to add, or -1. */
static void addresses(const struct warp *w, const struct op *o, const u8 *m, u64 *to,
                      struct access *x) {
    x->n = x->whole = x->scope = 0;
    for (int l = 0; l < LANES; l++) {
        if (!m[l]) continue;
        x->lane[x->n] = l;
        to[x->n++] = o->d == 32
            ? w->word[o->a * LANES + l] + (o->b < 0 ? 0 : w->word[o->b * LANES + l])
            : w->wide[o->a * LANES + l] + (o->b < 0 ? 0 : w->wide[o->b * LANES + l]);
    }
    if (o->d == 32) for (int k = 0; k < x->n; k++) to[k] = (u32)to[k];
}

static inline void put(struct warp *w, int width, s32 row, int lane, const u8 *from,
                       const struct op *o) {
    u64 v = 0;
    memcpy(&v, from, o->bytes);
    if (o->extend && o->bytes < 8) {
        int by = 64 - 8 * o->bytes;
        v = (u64)((s64)(v << by) >> by);
    }
    if (width == 16) w->half[row * LANES + lane] = v;
    else if (width == 32) w->word[row * LANES + lane] = v;
    else w->wide[row * LANES + lane] = v;
}

static int load(struct warp *w, const struct op *o, const u8 *m) {
    struct access x;
    struct shadow *shadow;
    u64 at[LANES];
    u8 *base;
    int size = o->bytes * o->count;
    const s32 *list = w->block->launch->lists + o->out;
    addresses(w, o, m, at, &x);
    int space = find(w, o->c, at, &x, size, &base, &shadow, 0);
    if (!space) return 0;
    if (w->block->launch->events && (space == 1 + SHARED || shadow) &&
        !watch_read(w, o, shadow, &x, size)) return 0;
    u8 rows[LANES * 32];
    for (int k = 0; k < x.n; k++) copy(rows + k * size, base + x.offset[k], size);
    for (int n = 0; n < o->count; n++)
        for (int k = 0; k < x.n; k++)
            put(w, list[2 * n], list[2 * n + 1], x.lane[k], rows + k * size + n * o->bytes, o);
    return 1;
}

static int store(struct warp *w, const struct op *o, const u8 *m) {
    struct access x;
    struct shadow *shadow;
    u64 at[LANES];
    u8 *base, rows[LANES * 32];
    int size = o->bytes * o->count;
    const s32 *list = w->block->launch->lists + o->out;
    addresses(w, o, m, at, &x);
    int space = find(w, o->c, at, &x, size, &base, &shadow, 1);
    if (!space) return 0;
    for (int n = 0; n < o->count; n++) {
        s32 width = list[2 * n], row = list[2 * n + 1] * LANES;
        for (int k = 0; k < x.n; k++) {
            const void *from = width == 16 ? (void *)(w->half + row + x.lane[k])
                             : width == 32 ? (void *)(w->word + row + x.lane[k])
                                           : (void *)(w->wide + row + x.lane[k]);
            memcpy(rows + k * size + n * o->bytes, from, o->bytes);
        }
    }
    if (w->block->launch->events && (space == 1 + SHARED || shadow) &&
        !watch_write(w, o, shadow, &x, size, base, rows)) return 0;
    for (int k = 0; k < x.n; k++) copy(base + x.offset[k], rows + k * size, size);
    if (space == 1 + GLOBAL) w->block->launch->stores++;
    return 1;
}

static int load_parameter(struct warp *w, const struct op *o, const u8 *m) {
    const struct launch *g = w->block->launch;
    const s32 *list = g->lists + o->out;
    if (!within(o->immediate, o->bytes * o->count, g->parameter_bytes)) return 0;
    for (int n = 0; n < o->count; n++)
        for (int l = 0; l < LANES; l++)
            if (m[l]) put(w, list[2 * n], list[2 * n + 1], l,
                          g->parameters + o->immediate + n * o->bytes, o);
    return 1;
}

/* ldmatrix and stmatrix, of all lanes; o->c: transposed. */
static int matrix(struct warp *w, const struct op *o, int write) {
    struct access x;
    struct shadow *shadow;
    u64 at[LANES];
    u8 *base;
    u16 rows[LANES][8], turned[LANES][8];
    const s32 *list = w->block->launch->lists + o->out;
    u8 m[LANES];
    for (int l = 0; l < LANES; l++) m[l] = l < 8 * o->count;
    addresses(w, o, m, at, &x);
    if (!find(w, SHARED, at, &x, 16, &base, &shadow, 0)) return 0;
    x.whole = 1;
    if (write)
        for (int n = 0; n < o->count; n++)
            for (int l = 0; l < LANES; l++) {
                u32 v = w->word[list[n] * LANES + l];
                memcpy(&rows[8 * n + l / 4][2 * (l % 4)], &v, 4);
            }
    else
        for (int k = 0; k < x.n; k++) memcpy(rows[k], base + x.offset[k], 16);
    if (o->c)
        for (int k = 0; k < x.n; k++)
            for (int j = 0; j < 8; j++) turned[(k & 24) | j][k & 7] = rows[k][j];
    u16(*matrices)[8] = o->c ? turned : rows;
    if (w->block->launch->events &&
        !(write ? watch_write(w, o, shadow, &x, 16, base, (u8 *)matrices)
                : watch_read(w, o, shadow, &x, 16))) return 0;
    if (write)
        for (int k = 0; k < x.n; k++) memcpy(base + x.offset[k], matrices[k], 16);
    else
        for (int n = 0; n < o->count; n++)
            for (int l = 0; l < LANES; l++)
                memcpy(w->word + list[n] * LANES + l, &matrices[8 * n + l / 4][2 * (l % 4)], 4);
    return 1;
}

/* ----------------------------------------------------------------------------------- products */

static const s8 TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* mma.m16n8k64 of NVFP4.  The sum of the products is exact in float64, in any order. */
static int nvfp4(struct warp *w, const struct op *o) {
    const s32 *list = w->block->launch->lists + o->out;
    s16 a[16][64], b[8][64];
    f64 sa[16][4], sb[8][4];
    /* the lanes of the scales, and bytes of them, which are 0 here */
    u32 first = w->half[o->c * LANES], second = w->half[o->d * LANES];
    if (first > 1 || second > 3 || w->half[o->bytes * LANES] || w->half[o->count * LANES]) return 0;
    for (int l = 0; l < LANES; l++) {
        int t0 = l % 4, t1 = l / 4;
        for (int r = 0; r < 4; r++) {
            u32 v = w->word[list[4 + r] * LANES + l];
            for (int k = 0; k < 8; k++) a[t1 + 8 * (r & 1)][8 * t0 + k + 32 * (r >> 1)] = TWICE[v >> 4 * k & 15];
        }
        for (int r = 0; r < 2; r++) {
            u32 v = w->word[list[8 + r] * LANES + l];
            for (int k = 0; k < 8; k++) b[t1][8 * t0 + k + 32 * r] = TWICE[v >> 4 * k & 15];
        }
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 4; k++) {
            u32 code = w->word[o->a * LANES + row % 8 * 4 + row / 8 + 2 * first] >> 8 * k & 255;
            sa[row][k] = code < 127 ? e4m3(code) : NAN;
        }
    for (int n = 0; n < 8; n++)
        for (int k = 0; k < 4; k++) {
            u32 code = w->word[o->b * LANES + n * 4 + second] >> 8 * k & 255;
            sb[n][k] = code < 127 ? e4m3(code) / 4 : NAN;
        }
    f32 sum[4][LANES];
    for (int l = 0; l < LANES; l++)
        for (int r = 0; r < 4; r++) {
            f32 c = float_of(w->word[list[10 + r] * LANES + l]);
            int row = l / 4 + 8 * (r >> 1), n = 2 * (l % 4) + (r & 1);
            f64 total = 0;
            for (int k = 0; k < 4; k++) {
                s32 dot = 0;
                for (int j = 0; j < 16; j++) dot += a[row][16 * k + j] * b[n][16 * k + j];
                total += dot * (sa[row][k] * sb[n][k]);
            }
            if (total == 0 && c == 0 && signbit(c)) return 0; /* the sign of a sum of zeros */
            sum[r][l] = one_nan((f32)(total + c));
        }
    for (int r = 0; r < 4; r++) memcpy(w->word + list[r] * LANES, sum[r], sizeof sum[r]);
    return 1;
}

/* mma.m16n8k16 of halves to float32; declined unless all sums are exact in float64. */
static int halves(struct warp *w, const struct op *o) {
    const s32 *list = w->block->launch->lists + o->out;
    f64 a[16][16], b[8][16];
    f32 sum[4][LANES];
    for (int l = 0; l < LANES; l++)
        for (int h = 0; h < 2; h++) {
            int t0 = 2 * (l % 4) + h, t1 = l / 4;
            for (int r = 0; r < 4; r++) {
                u16 v = w->word[list[4 + r] * LANES + l] >> 16 * h;
                a[t1 + 8 * (r & 1)][t0 + 8 * (r >> 1)] = o->c ? from_bf16(v) : from_f16(v);
            }
            for (int r = 0; r < 2; r++) {
                u16 v = w->word[list[8 + r] * LANES + l] >> 16 * h;
                b[t1][t0 + 8 * r] = o->c ? from_bf16(v) : from_f16(v);
            }
        }
    for (int l = 0; l < LANES; l++)
        for (int r = 0; r < 4; r++) {
            f64 total = 0, lost = 0, c = float_of(w->word[list[10 + r] * LANES + l]);
            int row = l / 4 + 8 * (r >> 1), n = 2 * (l % 4) + (r & 1);
            for (int k = 0; k < 16; k++) {
                f64 one = a[row][k] * b[n][k], next = total + one, part = next - total;
                lost += fabs(total - (next - part)) + fabs(one - part);
                total = next;
            }
            if (lost != 0 || c != c || (c == 0 && signbit(c))) return 0; /* NaN is not 0 */
            sum[r][l] = one_nan((f32)(total + c));
        }
    for (int r = 0; r < 4; r++) memcpy(w->word + list[r] * LANES, sum[r], sizeof sum[r]);
    return 1;
}

/* ------------------------------------------------------------------------------- instructions */

/* The codes, in the order of native.py: it reads them from this file. */
enum {
    NONE,
#define CODE(name, ...) name,
#include "core.h"
#undef CODE
    LD, ST, LDPARAM, LDMATRIX, STMATRIX, NVFP4, HALVES, BRA, SHFL, ELECT, VOTE, PRMT, LOP3,
    MOVPACK16, MOVPACK32, MOVUNPACK16, MOVUNPACK32, MOVBYTES, EX2, EX2FTZ, FMAFTZ
};

#define ROW(T, n) ((T *)(sizeof(T) == 1 ? (void *)w->pred : sizeof(T) == 2 ? (void *)w->half \
                       : sizeof(T) == 4 ? (void *)w->word : (void *)w->wide) + (s64)(n) * LANES)

/* Run one instruction by the lanes in m, all of them if whole; 0 if it is left to Python. */
static int execute(struct warp *w, const struct op *o, const u8 *m, int whole) {
    switch (o->code) {
#define CODE(name, R, A, B, C, value)                                                   \
    case name: {                                                                        \
        R *out = ROW(R, o->out);                                                        \
        const A *a_ = ROW(A, o->a);                                                     \
        const B *b_ = ROW(B, o->b);                                                     \
        const C *c_ = ROW(C, o->c);                                                     \
        R results[LANES];                                                               \
        EACH { A a = a_[l]; B b = b_[l]; C c = c_[l]; (void)b; (void)c; results[l] = value; }\
        if (whole) memcpy(out, results, sizeof results);                                \
        else for (int l = 0; l < LANES; l++) if (m[l]) out[l] = results[l];             \
        return 1;                                                                       \
    }
#include "core.h"
#undef CODE
    case LD: return load(w, o, m);
    case ST: return store(w, o, m);
    case LDPARAM: return load_parameter(w, o, m);
    case LDMATRIX: return whole && matrix(w, o, 0);
    case STMATRIX: return whole && matrix(w, o, 1);
    case NVFP4: return whole && nvfp4(w, o);
    case HALVES: return whole && halves(w, o);
    case PRMT: {
        u32 *out = ROW(u32, o->out);
        const u32 *a = ROW(u32, o->a), *b = ROW(u32, o->b), *c = ROW(u32, o->c);
        for (int l = 0; l < LANES; l++) {
            u64 pool = a[l] | (u64)b[l] << 32;
            u32 by = c[l], value = 0;
            for (int n = 0; n < 4; n++, by >>= 4) {
                u32 byte = pool >> (by & 7) * 8 & 255;
                value |= (by & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * n;
            }
            if (m[l]) out[l] = value;
        }
        return 1;
    }
    case LOP3: {
        u32 *out = ROW(u32, o->out);
        const u32 *a = ROW(u32, o->a), *b = ROW(u32, o->b), *c = ROW(u32, o->c);
        for (int l = 0; l < LANES; l++) {
            u32 value = 0;
            for (int n = 0; n < 8; n++)
                if (o->immediate >> n & 1)
                    value |= (n & 4 ? a[l] : ~a[l]) & (n & 2 ? b[l] : ~b[l]) & (n & 1 ? c[l] : ~c[l]);
            if (m[l]) out[l] = value;
        }
        return 1;
    }
    case MOVPACK16: case MOVPACK32: {
        for (int l = 0; l < LANES; l++) {
            if (!m[l]) continue;
            if (o->code == MOVPACK16)
                w->word[o->out * LANES + l] = w->half[o->a * LANES + l] | (u32)w->half[o->b * LANES + l] << 16;
            else
                w->wide[o->out * LANES + l] = w->word[o->a * LANES + l] | (u64)w->word[o->b * LANES + l] << 32;
        }
        return 1;
    }
    case MOVUNPACK16: case MOVUNPACK32: {
        for (int l = 0; l < LANES; l++) {
            if (!m[l]) continue;
            if (o->code == MOVUNPACK16) {
                u32 v = w->word[o->a * LANES + l];
                if (o->out >= 0) w->half[o->out * LANES + l] = v;
                if (o->b >= 0) w->half[o->b * LANES + l] = v >> 16;
            } else {
                u64 v = w->wide[o->a * LANES + l];
                if (o->out >= 0) w->word[o->out * LANES + l] = v;
                if (o->b >= 0) w->word[o->b * LANES + l] = v >> 32;
            }
        }
        return 1;
    }
    case MOVBYTES: {
        const s32 *list = w->block->launch->lists + o->out;
        for (int n = 0; n < 4; n++)
            for (int l = 0; list[n] >= 0 && l < LANES; l++)
                if (m[l]) w->half[list[n] * LANES + l] = w->word[o->a * LANES + l] >> 8 * n & 255;
        return 1;
    }
    case EX2: case EX2FTZ: {
        f32 results[LANES];
        for (int l = 0; l < LANES; l++) {
            f32 a = ROW(f32, o->a)[l];
            if (o->code == EX2FTZ) a = flush(a);
            f64 exact = exp2((f64)a);
            if (m[l] && a != 0 && exact == exact && exact != 0 && exact < 1e300 && unsure(exact)) return 0;
            results[l] = one_nan(o->code == EX2FTZ ? flush((f32)exact) : (f32)exact);
        }
        for (int l = 0; l < LANES; l++) if (m[l]) ROW(f32, o->out)[l] = results[l];
        return 1;
    }
    case FMAFTZ: {
        f32 results[LANES];
        for (int l = 0; l < LANES; l++) {
            f32 a = flush(ROW(f32, o->a)[l]), b = flush(ROW(f32, o->b)[l]), c = flush(ROW(f32, o->c)[l]);
            f64 near = (f64)a * b + c;
            if (m[l] && fabs(near) == LEAST) return 0;
            results[l] = one_nan(flushed(fmaf(a, b, c), near));
        }
        for (int l = 0; l < LANES; l++) if (m[l]) ROW(f32, o->out)[l] = results[l];
        return 1;
    }
    case SHFL: { /* o->d: idx, up, down, bfly; of all lanes */
        const u32 *members = ROW(u32, o->count), *a = ROW(u32, o->a);
        const u32 *by = ROW(u32, o->b), *control = ROW(u32, o->c);
        u32 results[LANES];
        u8 valid[LANES];
        if (!whole || members[0] != 0xFFFFFFFF) return 0;
        for (int l = 0; l < LANES; l++) {
            int segment = control[l] >> 8 & 31, clamp = control[l] & 31, step = by[l] & 31;
            int first = l & segment, last = first | (clamp & ~segment);
            int other = o->d == 0 ? first | (step & ~segment) : o->d == 1 ? l - step
                      : o->d == 2 ? l + step : l ^ step;
            valid[l] = o->d == 1 ? other >= last : other <= last;
            if (!valid[l]) other = l;
            if (other < 0 || other >= LANES) return 0;
            results[l] = a[other];
        }
        memcpy(ROW(u32, o->out), results, sizeof results);
        if (o->extend >= 0) memcpy(ROW(u8, o->extend), valid, sizeof valid);
        return 1;
    }
    case ELECT: {
        const u32 *members = ROW(u32, o->a);
        if (!whole) return 0;
        for (int l = 0; l < LANES; l++) if (members[l] != 0xFFFFFFFF) return 0;
        for (int l = 0; l < LANES; l++) {
            ROW(u8, o->b)[l] = l == 0;
            if (o->out >= 0) ROW(u32, o->out)[l] = 0;
        }
        return 1;
    }
    case VOTE: { /* o->d: all, any, uni, ballot; o->c: negated */
        const u32 *members = ROW(u32, o->b);
        const u8 *a = ROW(u8, o->a);
        u32 holds = 0;
        if (!whole) return 0;
        for (int l = 0; l < LANES; l++) {
            if (members[l] != 0xFFFFFFFF) return 0;
            holds |= (u32)(a[l] ^ o->c) << l;
        }
        u8 value = o->d == 0 ? holds == 0xFFFFFFFF : o->d == 1 ? holds != 0
                 : holds == 0 || holds == 0xFFFFFFFF;
        for (int l = 0; l < LANES; l++)
            if (o->d == 3) ROW(u32, o->out)[l] = holds; else ROW(u8, o->out)[l] = value;
        return 1;
    }
    default: return 0;
    }
}

/* ------------------------------------------------------------------------------------- the table */

/* Whether a file of registers has a row; ``width``: the bytes of an element, as in ROW. */
static int has(const struct launch *g, int width, s64 row) {
    int file = width == 1 ? 0 : width == 2 ? 1 : width == 4 ? 2 : 3;
    return row >= 0 && row < g->rows[file];
}

/* The same of a result that may be left out, which -1 says. */
static int may(const struct launch *g, int width, s64 row) { return row == -1 || has(g, width, row); }

/* Whether a list has so many rows of words from here on. */
static int words(const struct launch *g, s64 first, s64 count) {
    if (first < 0 || count < 0 || !within(first, count, g->list_count)) return 0;
    for (s64 n = 0; n < count; n++) if (!has(g, 4, g->lists[first + n])) return 0;
    return 1;
}

/* Whether an access is of elements that registers can hold, and the list has their places. */
static int elements(const struct launch *g, const struct op *o) {
    int size = o->bytes, count = o->count;
    if (size != 1 && size != 2 && size != 4 && size != 8) return 0;
    if ((count != 1 && count != 2 && count != 4 && count != 8) || size * count > 32) return 0;
    if (o->out < 0 || !within(o->out, 2 * count, g->list_count)) return 0;
    for (int n = 0; n < count; n++) {
        s32 width = g->lists[o->out + 2 * n], row = g->lists[o->out + 2 * n + 1];
        if ((width != 16 && width != 32 && width != 64) || 8 * size > width) return 0;
        if (!has(g, width / 8, row)) return 0;
    }
    return 1;
}

/* Whether an address is in registers of 32 or 64 bits. */
static int addressed(const struct launch *g, const struct op *o) {
    return (o->d == 32 || o->d == 64) && has(g, o->d / 8, o->a) && may(g, o->d / 8, o->b);
}

static int three(const struct launch *g, const struct op *o, int out, int a, int b, int c) {
    return has(g, out, o->out) && has(g, a, o->a) && has(g, b, o->b) && has(g, c, o->c);
}

/* Whether the registers, lists and targets of an instruction exist, and are of its kinds. */
static int sound(const struct launch *g, const struct op *o) {
    if (!may(g, 1, o->guard) || (o->negated & ~1)) return 0;
    switch (o->code) {
    case NONE: return 1;
#define CODE(name, R, A, B, C, value) \
    case name: return three(g, o, sizeof(R), sizeof(A), sizeof(B), sizeof(C));
#include "core.h"
#undef CODE
    case LD: case ST: return o->c >= GLOBAL && o->c <= GENERIC && elements(g, o) && addressed(g, o);
    case LDPARAM: return elements(g, o);
    case LDMATRIX: case STMATRIX:
        return (o->count == 1 || o->count == 2 || o->count == 4) &&
               words(g, o->out, o->count) && addressed(g, o);
    case NVFP4:
        return words(g, o->out, 14) && has(g, 4, o->a) && has(g, 4, o->b) && has(g, 2, o->c) &&
               has(g, 2, o->d) && has(g, 2, o->bytes) && has(g, 2, o->count);
    case HALVES: return words(g, o->out, 14);
    case BRA: return o->immediate >= 0 && o->immediate <= g->op_count;
    case SHFL:
        return three(g, o, 4, 4, 4, 4) && has(g, 4, o->count) && may(g, 1, o->extend);
    case ELECT: return may(g, 4, o->out) && has(g, 4, o->a) && has(g, 1, o->b);
    case VOTE:
        return has(g, o->d == 3 ? 4 : 1, o->out) && has(g, 1, o->a) && has(g, 4, o->b) &&
               !(o->c & ~1);
    case PRMT: case LOP3: case FMAFTZ: return three(g, o, 4, 4, 4, 4);
    case MOVPACK16: return has(g, 4, o->out) && has(g, 2, o->a) && has(g, 2, o->b);
    case MOVPACK32: return has(g, 8, o->out) && has(g, 4, o->a) && has(g, 4, o->b);
    case MOVUNPACK16: return may(g, 2, o->out) && has(g, 4, o->a) && may(g, 2, o->b);
    case MOVUNPACK32: return may(g, 4, o->out) && has(g, 8, o->a) && may(g, 4, o->b);
    case MOVBYTES:
        if (o->out < 0 || !within(o->out, 4, g->list_count)) return 0;
        for (int n = 0; n < 4; n++) if (!may(g, 2, g->lists[o->out + n])) return 0;
        return has(g, 4, o->a);
    case EX2: case EX2FTZ: return has(g, 4, o->out) && has(g, 4, o->a);
    default: return 0;
    }
}

/* The first instruction that run() may not have, or the number of all. */
s64 check(const struct launch *g) {
    s64 at = 0;
    while (at < g->op_count && sound(g, g->ops + at)) at++;
    return at;
}

/* ------------------------------------------------------------------------------------------ runs */

static const u8 ALL[LANES] = {
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* Of lanes that are apart, let those at the first position go on, as Grid._choose does; the others
   meet them at w->bound at the earliest.  0 if Python has to choose. */
static int choose(struct warp *w) {
    const struct launch *g = w->block->launch;
    s64 first = EXIT;
    int count = 0;
    w->bound = EXIT;
    for (int l = 0; l < LANES; l++)
        if (!w->stopped[l] && w->places[l] < first) first = w->places[l];
    if (first == EXIT || !g->ends[first] || g->gathers[first]) return 0;
    for (int l = 0; l < LANES; l++) {
        count += w->mask[l] = !w->stopped[l] && w->places[l] == first;
        if (!w->stopped[l] && !w->mask[l] && w->places[l] < w->bound) w->bound = w->places[l];
    }
    w->pc = first;
    w->apart = count < LANES;
    if (!w->apart) memset(w->spins, 0, LANES * sizeof *w->spins);
    return 1;
}

/* Count jumps back of lanes that wait for others, as Grid._finish does; 0 if others go first. */
static int patient(struct warp *w) {
    int patient = 1, back = 0;
    for (int l = 0; w->waited && l < LANES; l++)
        if (w->mask[l] && w->places[l] <= w->pc) {
            patient &= ++w->spins[l] < SPINS;
            back = 1;
        }
    if (back) w->waited = 0;
    return patient;
}

/* Run w->limit basic blocks from w->pc on, the first one from instruction w->at on, if that is in
   it.  Lanes that are apart: those of w->mask, while they stay together before position w->bound,
   where others are, and one block at least; then others, if w->parts. */
int run(struct warp *w) {
    struct launch *g = w->block->launch;
    s64 at = w->at;
    int all = 0;
    w->changed = 0;
    for (int l = 0; l < LANES; l++) all += !w->apart || w->mask[l];
    for (;;) {
        const u8 *active = w->apart ? w->mask : ALL;
        s64 end = g->ends[w->pc], next;
        if (at < 0) {
            if (!w->limit) return LIMIT;
            if (!end) return NO_BLOCK;
            w->limit--;
            g->executions[w->pc]++;
            at = w->pc;
        }
        next = end;
        int parted = 0;
        for (; at < end; at++) {
            const struct op *o = g->ops + at;
            const u8 *m = active;
            int whole = !w->apart;
            u8 taking[LANES];
            if (o->code == NONE) goto declined;
            if (o->guard >= 0) {
                const u8 *holds = w->pred + o->guard * LANES;
                int count = 0;
                for (int l = 0; l < LANES; l++) count += taking[l] = (holds[l] ^ o->negated) & active[l];
                if (!count) continue;
                if (count < all) {
                    whole = 0;
                    m = taking;
                    if (o->code == BRA) {
                        if (!w->parts) goto declined;
                        for (int l = 0; l < LANES; l++)
                            if (active[l]) w->places[l] = taking[l] ? o->immediate : end;
                        parted = 1;
                        continue;
                    }
                }
            }
            if (o->code == BRA) next = o->immediate; else if (!execute(w, o, m, whole)) goto declined;
        }
        w->last = end - 1;
        at = -1;
        int alone = w->apart, stays = !parted && (!alone || (
            !w->waited && next < w->bound && g->ends[next] && !g->gathers[next]));
        if (stays || !w->parts) {
            w->pc = next;
            if (stays) continue;
            return LIMIT;
        }
        for (int l = 0; !parted && l < LANES; l++) if (active[l]) w->places[l] = next;
        w->apart = w->changed = 1;
        if ((alone && !patient(w)) || !choose(w)) return CHOOSE;
        all = 0;
        for (int l = 0; l < LANES; l++) all += !w->apart || w->mask[l];
        continue;
    declined:
        w->at = at;
        return DECLINED;
    }
}

/* What somebody has seen: clocks of threads and copies by block; or those of one block, whose
   events all are. */
struct clocks {
    const s32 *const *by_block;
    const s32 *lengths;
    s64 blocks;
    const s32 *one;
    s64 length;
};

static const s32 *clock_of(const struct clocks *c, s32 block, s64 *length) {
    *length = c->length;
    if (!c->by_block) return c->one;
    *length = block < c->blocks ? c->lengths[block] : 0;
    return block < c->blocks ? c->by_block[block] : 0;
}

static inline int is_unknown(const struct events *e, s32 slot, const struct clocks *c) {
    s32 row = slot >> 5;
    s64 length, index = e->base[row] + (slot & 31);
    const s32 *seen = clock_of(c, e->block[row], &length);
    return !seen || e->clock[row] > (index < length ? seen[index] : 0);
}

/* Whether one of some earlier accesses, each ``row * 32 + lane`` of an event or 0, is not known. */
int unknown(const s32 *slots, s64 count, const struct events *e, const struct clocks *c) {
    s32 before = 0;
    for (s64 i = 0; i < count; i++) {
        if (!slots[i] || slots[i] == before) continue;
        if (is_unknown(e, slots[i], c)) return 1;
        before = slots[i];
    }
    return 0;
}

/* A copy's access: its block and line, what it knows, and what memory it is. */
struct copying {
    const struct launch *g;
    const struct shadow *s;
    const struct clocks *c;
    s32 block, line;
};

static int copy_reported(const struct copying *x, s32 slot, int table) {
    const struct events *e = x->g->events;
    s32 row = slot >> 5;
    int relation = e->block[row] != x->block ? 2 : 0, half = 0;
    if (!x->g->reported) return 0;
    if (!relation && !e->copy[row]) {
        s64 length;
        const s32 *seen = clock_of(x->c, e->block[row], &length);
        half = handed_over(seen, length, e->base[row], e->clock[row]);
    }
    u64 key = race_key(x->line, e->line[row], table, x->s->warps > 0, relation, half);
    return *reported_at(x->g, key) == key;
}

static int rows_unknown(const struct copying *x, const s32 *table, int number, int rows,
                        const s64 *places, s64 count) {
    for (int r = 0; table && r < rows; r++, table += x->s->size) {
        s32 before = 0;
        for (s64 i = 0; i < count; i++) {
            s32 slot = table[places[i]];
            if (!slot || slot == before) continue;
            if (is_unknown(x->g->events, slot, x->c) && !copy_reported(x, slot, number)) return 1;
            before = slot;
        }
    }
    return 0;
}

/* A copy reads or writes granules: whether it is in order and was remembered.  ``fenced``: the
   clocks up to which it sees writes of threads; null if it sees all that its thread saw. */
int watch_copy(const struct launch *g, const struct shadow *s, int write, const s64 *places,
               s64 count, s32 slot, const struct clocks *c, const struct clocks *fenced) {
    const struct events *e = g->events;
    struct copying x = {g, s, c, e->block[slot >> 5], e->line[slot >> 5]};
    s32 before = 0;
    if (!all_in(s, places, count)) return 0;
    if (rows_unknown(&x, s->writes, WRITES, 1, places, count) ||
        rows_unknown(&x, s->atomics, ATOMICS, 4, places, count)) return 0;
    if (write &&
        (rows_unknown(&x, s->reads, READS, s->warps ? 2 * s->warps : 4, places, count) ||
         rows_unknown(&x, s->copies, COPIES, 1, places, count))) return 0;
    for (s64 i = 0; i < count; i++) {
        s32 was = s->writes[places[i]];
        if (!was && s->warps && !write) return 0;
        if (!fenced || !was || was == before) continue;
        if (e->generic[was >> 5] && is_unknown(e, was, fenced)) return 0;
        before = was;
    }
    s32 *table = write ? s->writes : s->copies;
    if (!table) return 0;
    for (s64 i = 0; i < count; i++) table[places[i]] = slot;
    return 1;
}
