#include "order.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>

namespace stand_in {
namespace {

const int MOST_FRAMES = 14;
const std::size_t ALIGNMENT = 512;
const std::size_t LARGEST_RATIO = 64;  // between a block and what it is handed out for
const unsigned char POISON = 0xFF;     // four of these, or two, or eight, are a NaN

struct Access {
    Address begin, end;
    int stream;
    uint64_t epoch;
    bool writes;
    uint64_t owner;  // of the block
    std::string what;
    Stack stack;
};

struct Block {
    Address begin = 0;
    std::size_t capacity = 0;
    int stream = -1;  // that of pinned memory of the host
    std::size_t nbytes = 0;
    uint64_t owner = 0;  // how often it was handed out
    bool is_live = false;
    int protection = PROT_READ | PROT_WRITE;
    int unprotected = 0;
    std::set<int> users;  // recorded streams
    std::vector<Access> accesses;
    Stack freed;
};

struct Report {
    std::string text;
    Access earlier, later;
};

struct State {
    std::mutex mutex;
    std::vector<Clock> streams{(std::size_t)MOST_DEVICES};
    std::vector<uint64_t> asked = std::vector<uint64_t>(MOST_DEVICES);
    std::map<int, Clock> hosts{{0, {}}};
    int entered = 0;
    uint64_t host_waits = 0;
    std::map<Address, Block*> blocks;
    std::map<int, std::vector<Block*>> spare;  // by stream
    std::set<Block*> protected_blocks;
    std::vector<Report> reports;
};

// Never destroyed: tensors may be freed after statics are.
State& state() {
    static State* one = new State;
    return *one;
}

using Lock = std::lock_guard<std::mutex>;

thread_local int host_number = 0;

Clock& host() { return state().hosts[host_number]; }

Block* find(const void* memory) {
    State& s = state();
    auto after = s.blocks.upper_bound((Address)memory);
    if (after == s.blocks.begin()) return nullptr;
    Block* block = std::prev(after)->second;
    return (Address)memory < block->begin + block->capacity ? block : nullptr;
}

bool is_known(const Access& one, const Clock& clock) { return one.epoch <= clock.at(one.stream); }

// Nothing that is done later can come before it.
bool all_know(const Access& one) {
    return std::ranges::all_of(state().hosts, [&](const auto& each) { return is_known(one, each.second); });
}

// Pages are open or not for all threads: they are once one of them has waited.
bool any_knows(const Access& one) {
    return std::ranges::any_of(state().hosts, [&](const auto& each) { return is_known(one, each.second); });
}

// Let the host reach the pages of a pinned block as far as no stream is at them.
void protect(Block* block) {
    State& s = state();
    if (block->stream >= 0) return;
    int protection = PROT_READ | PROT_WRITE;
    if (!block->unprotected) {
        for (const Access& one : block->accesses) {
            if (any_knows(one)) continue;
            protection &= one.writes ? PROT_NONE : PROT_READ;
        }
    }
    if (protection != block->protection) mprotect((void*)block->begin, block->capacity, protection);
    block->protection = protection;
    if (protection == (PROT_READ | PROT_WRITE)) {
        s.protected_blocks.erase(block);
    } else {
        s.protected_blocks.insert(block);
    }
}

void join_host(const Clock& clock) {
    host().join(clock);
    std::set<Block*> blocks = state().protected_blocks;
    for (Block* block : blocks) protect(block);
}

void order_locked(int stream, const Clock& after) { state().streams[stream].join(after); }

struct sigaction previous_handler;

// The host touched a page that it must not: say so, open the page, and let it try again.
void on_fault(int number, siginfo_t* info, void*) {
    Stack stack;
    bool is_ours = false;
    if (PyGILState_Check()) stack = python_stack();
    {
        Lock lock(state().mutex);
        Block* block = find(info->si_addr);
        // Another thread may have opened it by now: then trying again is enough.
        is_ours = block && block->stream < 0;
        if (is_ours && block->protection != (PROT_READ | PROT_WRITE)) {
            Access host{(Address)info->si_addr, (Address)info->si_addr + 1, -1, 0, block->protection != PROT_NONE,
                        block->owner, "the host", stack};
            for (const Access& one : block->accesses) {
                if (any_knows(one)) continue;
                const char* text = one.writes ? "the host touches pinned memory that a stream still writes"
                                              : "the host writes pinned memory that a stream still reads";
                state().reports.push_back({text, one, host});
            }
            block->accesses.clear();
            protect(block);
        }
    }
    if (is_ours) return;
    sigaction(number, &previous_handler, nullptr);
}

void watch_faults() {
    static bool is_watching = [] {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigaction(SIGSEGV, &action, &previous_handler);
        return true;
    }();
    (void)is_watching;
}

std::string name_of(int stream) {
    if (stream < 0) return "no stream";
    return stream < MOST_DEVICES ? "the default stream of device " + std::to_string(stream)
                                 : "stream " + std::to_string(stream);
}

std::string described(const Access& one) {
    std::string text = one.what + (one.stream < 0 ? "" : " on " + name_of(one.stream)) + "\n";
    for (const Frame& frame : one.stack) {
        PyObject* line = PyUnicode_FromFormat(
            "    %U:%d in %U\n", frame.code->co_filename, frame.line, frame.code->co_qualname);
        const char* octets = line ? PyUnicode_AsUTF8(line) : nullptr;
        if (octets) text += octets;
        Py_XDECREF(line);
        PyErr_Clear();
    }
    return text;
}

void hand_out(Block* block, std::size_t nbytes) {
    block->is_live = true;
    block->nbytes = nbytes;
    block->owner++;
    std::erase_if(block->accesses, all_know);
}

Block* take_spare(std::vector<Block*>& spare, std::size_t nbytes) {
    // The one that was freed last: who still uses it is most likely found.
    for (auto at = spare.rbegin(); at != spare.rend(); ++at) {
        Block* block = *at;
        if (block->capacity < nbytes || block->capacity / LARGEST_RATIO > std::max(nbytes, ALIGNMENT)) continue;
        spare.erase(std::next(at).base());
        return block;
    }
    return nullptr;
}

Block* make_block(void* memory, std::size_t capacity, int stream) {
    Block* block = new Block;
    block->begin = (Address)memory;
    block->capacity = capacity;
    block->stream = stream;
    state().blocks[block->begin] = block;
    return block;
}

// Streams that were recorded have passed all they were told; and so has what they waited for.
void pass(Block* block, const Clock& clock) {
    std::erase_if(block->accesses, [&](const Access& one) { return one.epoch <= clock.at(one.stream); });
}

}  // namespace

void Clock::set(int stream, uint64_t epoch) {
    if (stream >= (int)epochs.size()) epochs.resize(stream + 1);
    epochs[stream] = epoch;
}

void Clock::join(const Clock& other) {
    if (epochs.size() < other.epochs.size()) epochs.resize(other.epochs.size());
    for (std::size_t i = 0; i < other.epochs.size(); i++) epochs[i] = std::max(epochs[i], other.epochs[i]);
}

bool Clock::covers(const Clock& other) const {
    for (std::size_t i = 0; i < other.epochs.size(); i++)
        if (other.epochs[i] > at((int)i)) return false;
    return true;
}

int make_stream() {
    Lock lock(state().mutex);
    state().streams.emplace_back();
    state().asked.push_back(0);
    return (int)state().streams.size() - 1;
}

int stream_count() {
    Lock lock(state().mutex);
    return (int)state().streams.size();
}

Clock clock_of(int stream) {
    Lock lock(state().mutex);
    return state().streams[stream];
}

void order(int stream, const Clock& after) {
    Lock lock(state().mutex);
    order_locked(stream, after);
}

void record(Event& event, int stream) {
    Lock lock(state().mutex);
    order_locked(stream, host());
    event.clock = state().streams[stream];
    event.is_recorded = true;
    event.was_asked = false;
    event.recorded_s = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool query(Event& event) {
    Lock lock(state().mutex);
    if (!event.is_recorded || host().covers(event.clock)) return true;
    if (!event.was_asked) {
        event.was_asked = true;
        return false;
    }
    state().host_waits++;
    join_host(event.clock);
    return true;
}

bool query_stream(int stream) {
    Lock lock(state().mutex);
    State& s = state();
    const Clock& clock = s.streams[stream];
    if (host().covers(clock)) return true;
    uint64_t epoch = clock.at(stream);
    if (s.asked[stream] != epoch) {
        s.asked[stream] = epoch;
        return false;
    }
    s.host_waits++;
    join_host(clock);
    return true;
}

void host_waits_for(const Clock& clock) {
    Lock lock(state().mutex);
    if (host().covers(clock)) return;
    state().host_waits++;
    join_host(clock);
}

void enter_as_host() {
    Lock lock(state().mutex);
    Clock known = host();
    host_number = ++state().entered;
    state().hosts[host_number] = known;
}

void leave_as_host() {
    Lock lock(state().mutex);
    state().hosts.erase(host_number);
    host_number = 0;
}

Clock host_clock() {
    Lock lock(state().mutex);
    return host();
}

void tell_host(const Clock& clock) {
    Lock lock(state().mutex);
    join_host(clock);
}

uint64_t host_waits() {
    Lock lock(state().mutex);
    return state().host_waits;
}

void* allocate(std::size_t nbytes, int stream) {
    if (nbytes == 0) return nullptr;
    std::size_t capacity = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Lock lock(state().mutex);
    Block* block = take_spare(state().spare[stream], nbytes);
    if (!block) {
        void* memory = aligned_alloc(ALIGNMENT, capacity);
        if (!memory) return nullptr;
        memset(memory, POISON, capacity);
        block = make_block(memory, capacity, stream);
    }
    hand_out(block, nbytes);
    return (void*)block->begin;
}

void release(void* memory) {
    if (!memory) return;
    Stack stack = python_stack();
    Lock lock(state().mutex);
    State& s = state();
    Block* block = find(memory);
    // Who gets it next comes after this thread, and what it knows to be done.
    pass(block, host());
    for (int user : block->users) pass(block, s.streams[user]);
    block->users.clear();
    block->is_live = false;
    block->freed = stack;
    memset((void*)block->begin, POISON, block->capacity);
    s.spare[block->stream].push_back(block);
}

void record_use(void* memory, int stream) {
    Lock lock(state().mutex);
    Block* block = find(memory);
    if (block && stream != block->stream) block->users.insert(stream);
}

std::size_t rest_of_block(Address memory) {
    Lock lock(state().mutex);
    Block* block = find((void*)memory);
    return block && block->stream >= 0 ? block->begin + block->nbytes - memory : 0;
}

void* allocate_pinned(std::size_t nbytes) {
    if (nbytes == 0) return nullptr;
    watch_faults();
    std::size_t page = (std::size_t)sysconf(_SC_PAGESIZE), capacity = (nbytes + page - 1) / page * page;
    Lock lock(state().mutex);
    Block* block = take_spare(state().spare[-1], nbytes);
    if (!block) {
        void* memory = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        memset(memory, POISON, capacity);
        block = make_block(memory, capacity, -1);
    }
    hand_out(block, nbytes);
    return (void*)block->begin;
}

// As CUDA's allocator of pinned memory has it, which records an event behind every copy: the block waits for them.
void release_pinned(void* memory) {
    if (!memory) return;
    Lock lock(state().mutex);
    Block* block = find(memory);
    block->accesses.clear();
    protect(block);
    block->is_live = false;
    memset((void*)block->begin, POISON, block->capacity);
    state().spare[-1].push_back(block);
}

bool is_pinned(const void* memory) {
    Lock lock(state().mutex);
    Block* block = find(memory);
    return block && block->stream < 0;
}

Unprotected::Unprotected(const void* memory) {
    Lock lock(state().mutex);
    Block* block = find(memory);
    block_ = block && block->stream < 0 ? block : nullptr;
    if (!block_) return;
    block->unprotected++;
    protect(block);
}

Unprotected::~Unprotected() {
    if (!block_) return;
    Lock lock(state().mutex);
    ((Block*)block_)->unprotected--;
    protect((Block*)block_);
}

Stack python_stack() {
    Stack stack;
    if (!Py_IsInitialized() || _Py_IsFinalizing()) return stack;
    PyGILState_STATE held = PyGILState_Ensure();
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame && (int)stack.size() < MOST_FRAMES) {
        // The code is held for good: a report may ask for it at any time.
        stack.push_back({PyFrame_GetCode(frame), PyFrame_GetLineNumber(frame)});
        PyFrameObject* caller = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = caller;
    }
    Py_XDECREF(frame);
    PyGILState_Release(held);
    return stack;
}

void access(const std::string& what, int stream, const void* memory, std::size_t nbytes, bool writes) {
    if (nbytes == 0) return;
    Stack stack = python_stack();
    Lock lock(state().mutex);
    State& s = state();
    Block* block = find(memory);
    if (!block) {
        if (stream >= 0) s.reports.push_back({"a kernel uses memory that is not the device's", {}, {}});
        return;
    }
    Clock& clock = s.streams[stream];
    clock.join(host());
    clock.set(stream, clock.at(stream) + 1);
    Access now{(Address)memory, (Address)memory + nbytes, stream, clock.at(stream), writes, block->owner, what, stack};
    if (!block->is_live) {
        Access freed{now.begin, now.end, -1, 0, true, block->owner, "freed", block->freed};
        s.reports.push_back({"memory is used that was freed", freed, now});
        return;
    }
    if (now.end > block->begin + block->nbytes)
        s.reports.push_back({"an access goes beyond the end of its block", now, now});
    std::erase_if(block->accesses, [&](const Access& one) {
        if (all_know(one)) return true;
        if (one.end <= now.begin || now.end <= one.begin) return false;
        bool covered = now.begin <= one.begin && one.end <= now.end;
        if (one.epoch <= clock.at(one.stream)) return covered && (writes || (!one.writes && one.stream == stream));
        if (!writes && !one.writes) return false;
        const char* text = one.owner != now.owner ? "memory was freed, and is used anew while a stream still uses it"
                           : one.writes           ? "a stream uses what another still writes"
                                                  : "a stream writes what another still reads";
        s.reports.push_back({text, one, now});
        return true;
    });
    block->accesses.push_back(now);
    protect(block);
}

std::vector<std::string> take_reports() {
    std::vector<Report> reports;
    {
        Lock lock(state().mutex);
        reports.swap(state().reports);
    }
    std::vector<std::string> texts;
    for (const Report& one : reports) {
        std::string text = one.text;
        if (!one.earlier.what.empty()) text += "\n  first: " + described(one.earlier);
        if (!one.later.what.empty()) text += "  then: " + described(one.later);
        texts.push_back(text);
    }
    return texts;
}

}  // namespace stand_in
