// The detector. Each stream and each CPU thread has a vector clock, and shadow memory holds the last accesses to each
// address.
//
// A launch happens after what the launching thread knows. Events, waits and queries order streams and threads as CUDA
// defines. Two accesses by different clocks that are not ordered are an alarm if one of them writes, or if the memory
// was freed and allocated in between. Accesses that are ordered before a write are dropped, because later accesses that are
// ordered after the write are also ordered after it. One lock protects all state of the process.
#define Py_BUILD_CORE
#include <Python.h> // must come first
#include <internal/pycore_frame.h>

#include "race.h"
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace {

constexpr int MAX_CLOCKS = 512;
using Time = std::array<uint32_t, MAX_CLOCKS>; // one entry for each clock

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

struct Clock {
    std::string name;
    bool is_host;
    Time time{}; // what is ordered before its next work
};
std::deque<Clock> clocks; // references stay valid when one is added
Time completed{}; // what some CPU thread knows to be complete
std::unordered_map<void *, int> clock_of_stream;
std::unordered_map<long, int> clock_of_thread;
std::unordered_map<void *, Time> events;
std::unordered_map<uint64_t, Time> releases;

void join(Time &time, const Time &other) {
    for (size_t i = 0; i < clocks.size(); i++) time[i] = std::max(time[i], other[i]);
}

bool covers(const Time &time, const Time &other) {
    for (size_t i = 0; i < clocks.size(); i++)
        if (time[i] < other[i]) return false;
    return true;
}

int add_clock(const std::string &name, bool is_host) {
    if (clocks.size() == MAX_CLOCKS) {
        fprintf(stderr, "race: more than %d streams and threads\n", MAX_CLOCKS);
        abort();
    }
    clocks.push_back({name, is_host});
    return clocks.size() - 1;
}

int stream_clock(void *stream) {
    auto found = clock_of_stream.find(stream);
    if (found != clock_of_stream.end()) return found->second;
    std::string name = stream ? "stream " + std::to_string(clock_of_stream.size()) : "main stream";
    return clock_of_stream[stream] = add_clock(name, false);
}

// The main thread shares a clock with the threads of autograd, because backward() waits for them.
int host_clock() {
    static thread_local int own = -1;
    static thread_local pid_t owner; // a fork has other threads
    if (own >= 0 && owner == getpid()) return own;
    owner = getpid();
    long id = syscall(SYS_gettid);
    char name[32] = "";
    prctl(PR_GET_NAME, name);
    if (!strncmp(name, "pt_autograd", 11)) id = owner;
    auto found = clock_of_thread.find(id);
    if (found != clock_of_thread.end()) return own = found->second;
    return own = clock_of_thread[id] = add_clock(id == owner ? "CPU" : std::string("CPU thread ") + name, true);
}

Time &host_time() { return clocks[host_clock()].time; }

// Start work on a stream. It happens after everything that the calling thread knows.
int launch(int clock) {
    join(clocks[clock].time, host_time());
    clocks[clock].time[clock]++;
    return clock;
}

void learn(const Time &time) {
    join(host_time(), time);
    join(completed, time);
}

// An event is complete only if a thread has waited for it or for later work. This GPU is as slow as a GPU can be, so
// nothing is ordered by luck.
int query(const Time &time) {
    if (!covers(completed, time)) return 0;
    join(host_time(), time);
    return 1;
}

// Strings are stored once and referenced by number.
std::vector<std::string> texts{""};
std::unordered_map<std::string, int> text_numbers;

int intern(const std::string &text) {
    auto [entry, is_new] = text_numbers.try_emplace(text, texts.size());
    if (is_new) texts.push_back(text);
    return entry->second;
}

const char *ascii(PyObject *text) {
    return text && PyUnicode_IS_COMPACT_ASCII(text) ? (const char *)((PyASCIIObject *)text + 1) : "?";
}

// Return the Python lines that this thread runs, innermost first. No other thread changes the frames of a thread while
// it is here, so this is safe without the GIL.
int python_lines() {
    static auto get_state = (PyThreadState * (*)()) dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    static auto get_line = (int (*)(PyCodeObject *, int))dlsym(RTLD_DEFAULT, "PyCode_Addr2Line");
    static std::unordered_map<uint64_t, int> seen;
    PyThreadState *state = get_state ? get_state() : nullptr;
    if (!state || !state->cframe) return 0;

    std::vector<_PyInterpreterFrame *> frames;
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (auto *frame = state->cframe->current_frame; frame; frame = frame->previous) {
        if (_PyFrame_IsIncomplete(frame)) continue;
        frames.push_back(frame);
        for (void *part : {(void *)frame->f_code, (void *)frame->prev_instr})
            hash = (hash ^ (uint64_t)part) * 1099511628211u;
    }
    auto [entry, is_new] = seen.try_emplace(hash, 0);
    if (!is_new) return entry->second;

    std::string lines;
    for (size_t i = 0; i < std::min(frames.size(), size_t(14)); i++) {
        PyCodeObject *code = frames[i]->f_code;
        std::string file = ascii(code->co_filename);
        size_t site = file.rfind("site-packages/");
        if (site != std::string::npos) file = file.substr(site + 14);
        int line = get_line(code, _PyInterpreterFrame_LASTI(frames[i]) * sizeof(_Py_CODEUNIT));
        lines += "      " + file + ":" + std::to_string(line) + " " + ascii(code->co_name) + "\n";
    }
    return entry->second = intern(lines);
}

// Allocations. A generation is the number of an allocation, so that two tensors at one address differ.
struct Allocation {
    uintptr_t end;
    uint32_t generation;
    int lines; // where it was allocated
    bool is_live;
};
std::map<uintptr_t, Allocation> allocations; // the newest at each address, live or not
std::vector<int> freed_lines{0};             // of each generation

const Allocation *find_allocation(uintptr_t address) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return nullptr;
    --next;
    return address < next->second.end ? &next->second : nullptr;
}

// Shadow memory: cells, which do not overlap, with the accesses that are not yet ordered before a write.
struct Touch {
    int clock;
    uint32_t time, generation;
    Access how;
    int what, lines, allocated_lines;
};
struct Cell {
    uintptr_t end;
    std::vector<Touch> touches;
};
std::map<uintptr_t, Cell> cells;
uint64_t alarms, reuses;
std::map<std::array<int, 6>, int> reported; // alarms by both clocks, operators and lines

FILE *log_file() {
    static FILE *file;
    static pid_t owner; // a fork writes a file of its own
    if (owner == getpid()) return file;
    owner = getpid();
    const char *path = getenv("GHOST_RACE");
    file = fopen((std::string(path ? path : "race") + "." + std::to_string(owner)).c_str(), "w");
    if (!file) abort();
    setvbuf(file, nullptr, _IOLBF, 1 << 16); // complete even if the process is killed
    return file;
}

std::string describe(const Touch &touch) {
    const char *how = touch.how == READ ? "reads" : touch.how == WRITE ? "writes" : "reads or writes";
    std::string text = clocks[touch.clock].name + " " + how + ": " + texts[touch.what] + "\n" + texts[touch.lines];
    if (!touch.generation) return text;
    text += "    in allocation " + std::to_string(touch.generation) + ", made at\n" + texts[touch.allocated_lines];
    int freed = freed_lines[touch.generation];
    return freed ? text + "    and freed at\n" + texts[freed] : text;
}

void report(const char *kind, uintptr_t start, uintptr_t end, const Touch &old, const Touch &now) {
    alarms++;
    if (reported[{old.clock, old.what, old.lines, now.clock, now.what, now.lines}]++) return;
    fprintf(log_file(), "ALARM %s: %zu bytes at %p\n  earlier: %s  later, not ordered after it: %s\n", kind,
            end - start, (void *)start, describe(old).c_str(), describe(now).c_str());
}

// Split the cell that contains `address`, so that a cell starts there.
void split_cell(uintptr_t address) {
    auto next = cells.upper_bound(address);
    if (next == cells.begin()) return;
    --next;
    if (next->first == address || next->second.end <= address) return;
    Cell right = next->second;
    next->second.end = address;
    cells.emplace(address, std::move(right));
}

void fill_holes(uintptr_t start, uintptr_t end) {
    uintptr_t at = start;
    for (auto cell = cells.lower_bound(start); cell != cells.end() && cell->first < end; ++cell) {
        if (cell->first > at) cells.emplace(at, Cell{cell->first, {}});
        at = cell->second.end;
    }
    if (at < end) cells.emplace(at, Cell{end, {}});
}

// Compare an access with the earlier ones of a cell, and add it.
void touch_cell(uintptr_t start, Cell &cell, const Touch &now) {
    auto compare = [&](const Touch &old) { // returns whether to forget the old one
        bool is_same_clock = old.clock == now.clock, is_reuse = old.generation != now.generation;
        bool is_ordered = is_same_clock || clocks[now.clock].time[old.clock] >= old.time;
        bool conflicts = !is_same_clock && (is_reuse || old.how == WRITE || now.how == WRITE);
        if (conflicts && !is_ordered) report(is_reuse ? "REUSE" : "RACE", start, cell.end, old, now);
        if (conflicts && is_ordered && is_reuse) reuses++;
        return is_ordered && (now.how == WRITE || (is_same_clock && old.how == now.how && !is_reuse));
    };
    auto &touches = cell.touches;
    touches.erase(std::remove_if(touches.begin(), touches.end(), compare), touches.end());
    touches.push_back(now);
}

void touch(uintptr_t start, size_t bytes, int clock, Access how, int what, int lines) {
    if (!bytes) return;
    uintptr_t end = start + bytes;
    const Allocation *allocation = find_allocation(start);
    Touch now{clock, clocks[clock].time[clock], 0, how, what, lines, 0};
    if (allocation) {
        now.generation = allocation->generation, now.allocated_lines = allocation->lines;
        end = std::min(end, allocation->end);
    }
    split_cell(start), split_cell(end);
    fill_holes(start, end);
    auto first = cells.lower_bound(start);
    bool can_merge = true;
    for (auto cell = first; cell != cells.end() && cell->first < end; ++cell) {
        touch_cell(cell->first, cell->second, now);
        can_merge &= cell->second.touches.size() == 1;
    }
    if (can_merge) {
        cells.erase(std::next(first), cells.lower_bound(end));
        first->second.end = end;
    }
}

// The operators that this thread runs, innermost last.
struct Argument {
    uintptr_t start;
    size_t bytes;
    Access how;
    bool is_on_host;
};
struct Scope {
    std::string name;
    bool is_operator;
    std::vector<Argument> arguments{};
    std::vector<int> streams{}; // in which it launched kernels
    bool is_delegated = false; // inner operators, or work whose addresses are known, access its memory
    std::string kernel{};
    int lines = 0;
};
thread_local std::vector<Scope> scopes;
thread_local void *library_stream;
thread_local std::map<uintptr_t, Access> hints;

Scope *innermost_operator() {
    for (size_t i = scopes.size(); i-- > 0;)
        if (scopes[i].is_operator) return &scopes[i];
    return nullptr;
}

std::string scope_names() {
    std::string names;
    for (size_t i = scopes.size() > 4 ? scopes.size() - 4 : 0; i < scopes.size(); i++)
        names += (names.empty() ? "" : " > ") + scopes[i].name;
    return names;
}

struct Summary {
    ~Summary() {
        if (!cells.empty()) race_summary();
    }
} summary;

} // namespace

void race_summary() {
    Lock lock(mutex);
    fprintf(log_file(), "SUMMARY alarms %lu reuses %lu allocations %zu\n", alarms, reuses, freed_lines.size() - 1);
}

uint64_t race_alarms() { return alarms; }
uint64_t race_reuses() { return reuses; }

void race_kernel(void *stream, const char *kernel) {
    Lock lock(mutex);
    int clock = launch(stream_clock(stream));
    Scope *scope = innermost_operator();
    if (!scope) return;
    auto &streams = scope->streams;
    if (std::find(streams.begin(), streams.end(), clock) == streams.end()) streams.push_back(clock);
    if (scope->kernel.empty()) scope->kernel = kernel, scope->lines = python_lines();
}

void race_library_stream(void *stream) { library_stream = stream; }
void race_library_kernel(const char *kernel) { race_kernel(library_stream, kernel); }

int race_work(void *stream) {
    Lock lock(mutex);
    if (Scope *scope = innermost_operator()) scope->is_delegated = true;
    return launch(stream_clock(stream));
}

void race_touch(int clock, const void *start, size_t bytes, Access how, const char *what) {
    if (!start || !bytes) return;
    Lock lock(mutex);
    std::string names = scope_names();
    touch((uintptr_t)start, bytes, clock, how, intern(what + (names.empty() ? names : " in " + names)), python_lines());
}

void race_touch_allocation(int clock, uintptr_t address, const char *what) {
    Lock lock(mutex);
    const Allocation *allocation = find_allocation(address);
    if (!allocation || !allocation->is_live) return;
    auto hint = hints.find(address);
    Access how = hint == hints.end() ? UNKNOWN : hint->second;
    race_touch(clock, (void *)address, allocation->end - address, how, what);
}

void race_hint(uint64_t address, Access how) {
    if (!address) return hints.clear();
    auto [hint, is_new] = hints.try_emplace(address, how);
    if (how == WRITE) hint->second = WRITE;
}

void race_host_touch(const void *start, size_t bytes, Access how, const char *what) {
    if (ghost_place(start) != 2) return;
    Lock lock(mutex);
    int clock = host_clock();
    clocks[clock].time[clock]++;
    race_touch(clock, start, bytes, how, what);
}

void race_event_record(void *event, void *stream) {
    Lock lock(mutex);
    int clock = stream_clock(stream);
    join(clocks[clock].time, host_time());
    events[event] = clocks[clock].time;
}

void race_event_destroy(void *event) {
    Lock lock(mutex);
    events.erase(event);
}

void race_event_wait(void *event) {
    Lock lock(mutex);
    auto found = events.find(event);
    if (found != events.end()) learn(found->second);
}

int race_event_query(void *event) {
    Lock lock(mutex);
    auto found = events.find(event);
    return found == events.end() || query(found->second);
}

void race_stream_wait_event(void *stream, void *event) {
    Lock lock(mutex);
    auto found = events.find(event);
    if (found != events.end()) join(clocks[stream_clock(stream)].time, found->second);
}

void race_stream_wait(void *stream) {
    Lock lock(mutex);
    int clock = stream_clock(stream);
    learn(clocks[clock].time);
}

int race_stream_query(void *stream) {
    Lock lock(mutex);
    int clock = stream_clock(stream);
    return query(clocks[clock].time);
}

void race_device_wait() {
    Lock lock(mutex);
    host_clock(); // may add a clock
    for (size_t i = 0; i < clocks.size(); i++)
        if (!clocks[i].is_host) learn(clocks[i].time);
}

void race_release(uint64_t key) {
    Lock lock(mutex);
    int clock = host_clock();
    clocks[clock].time[clock]++;
    join(releases[key], clocks[clock].time);
}

void race_acquire(uint64_t key) {
    Lock lock(mutex);
    auto found = releases.find(key);
    if (found != releases.end()) join(host_time(), found->second);
}

void race_alloc(uint64_t start, size_t bytes, void *stream) {
    Lock lock(mutex);
    uintptr_t end = start + bytes;
    auto old = allocations.upper_bound(start);
    if (old != allocations.begin() && std::prev(old)->second.end > start) --old;
    while (old != allocations.end() && old->first < end) { // keep the parts beside the new one
        auto [from, part] = *old;
        old = allocations.erase(old);
        if (part.end > end) old = allocations.emplace(end, part).first;
        part.end = start;
        if (from < start) allocations.emplace(from, part);
    }
    allocations[start] = {end, (uint32_t)freed_lines.size(), python_lines(), true};
    freed_lines.push_back(0);
    if (Scope *scope = innermost_operator()) scope->arguments.push_back({start, bytes, WRITE, false});
}

void race_free(uint64_t start) {
    Lock lock(mutex);
    auto found = allocations.find(start);
    if (found == allocations.end()) return;
    found->second.is_live = false;
    freed_lines[found->second.generation] = python_lines();
}

void race_unmap(uint64_t start, size_t bytes) { // CUDA waits for the device before it unmaps memory
    Lock lock(mutex);
    race_device_wait();
    split_cell(start), split_cell(start + bytes);
    cells.erase(cells.lower_bound(start), cells.lower_bound(start + bytes));
}

void race_push(const char *name, bool is_operator) {
    scopes.push_back({name, is_operator});
}

void race_argument(uint64_t start, size_t bytes, Access how, bool is_on_host) {
    if (!scopes.empty()) scopes.back().arguments.push_back({start, bytes, how, is_on_host});
}

void race_pop() {
    if (scopes.empty()) return;
    Scope &scope = scopes.back();
    if (scope.is_operator && !scope.streams.empty()) {
        Lock lock(mutex);
        int what = intern(scope_names() + " (" + scope.kernel.substr(0, 60) + ")");
        for (int clock : scope.streams)
            for (const Argument &argument : scope.arguments)
                if (!argument.is_on_host)
                    touch(argument.start, argument.bytes, clock, argument.how, what, scope.lines);
    } else if (scope.is_operator && !scope.is_delegated) {
        for (const Argument &argument : scope.arguments)
            if (argument.is_on_host)
                race_host_touch((void *)argument.start, argument.bytes, argument.how, "the CPU");
    }
    auto is_on_host = [](const Argument &argument) { return argument.is_on_host; };
    bool uses_host = std::any_of(scope.arguments.begin(), scope.arguments.end(), is_on_host);
    bool delegates = scope.is_operator && (uses_host || scope.is_delegated);
    scopes.pop_back();
    Scope *outer = innermost_operator();
    if (outer && delegates) outer->is_delegated = true;
}
