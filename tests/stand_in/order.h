// What a stand-in device was told, in which order: its memory, its streams, and what orders one access before another.
//
// All work is done at once, on the host; what is checked is the order that a device would have to keep. Streams have
// vector clocks: an access is ordered before another if the other's stream waited for it, by an event or through a host
// that waited. That the host told one stream after the other orders nothing.
//
// Each thread that enters as a host of its own has a clock, too, and all others share one: what one of them waited for
// another knows only once it was told. Threads tell each other by what threads.py watches.

#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stand_in {

using Address = std::uintptr_t;

const int MOST_DEVICES = 16;

// How far each stream has come, by its number. The default stream of device `d` has the number `d`.
struct Clock {
    std::vector<uint64_t> epochs;

    uint64_t at(int stream) const { return stream < (int)epochs.size() ? epochs[stream] : 0; }
    void set(int stream, uint64_t epoch);
    void join(const Clock& other);
    bool covers(const Clock& other) const;
};

struct Event {
    Clock clock;
    bool is_recorded = false;
    bool was_asked = false;  // and said that it was not done
    double recorded_s = 0.0;
};

// Streams.
int make_stream();  // returns its number
Clock clock_of(int stream);
void order(int stream, const Clock& after);  // what is enqueued on it from now on comes after that
void record(Event& event, int stream);
// Whether it is done: at first it is not, unless the host knows; a program must be right whatever it is told.
bool query(Event& event);
bool query_stream(int stream);
void host_waits_for(const Clock& clock);
void enter_as_host();  // from now on this thread knows what it waits for itself, and what it is told
void leave_as_host();
Clock host_clock();    // what this thread knows
void tell_host(const Clock& clock);
uint64_t host_waits();  // how often the host waited for something that it did not know to be done
int stream_count();

// Memory. A freed block is handed out again at once on its stream, as CUDA's caching allocator does; where other streams
// were recorded, as if these had passed what they were told until then. Freed memory is filled with bytes of NaN.
void* allocate(std::size_t nbytes, int stream);
void release(void* memory);
void record_use(void* memory, int stream);
std::size_t rest_of_block(Address memory);  // the bytes from there to the end of what was allocated; 0: not of a device

// Pinned memory of the host. Its pages cannot be read while a stream still writes them, nor be written while one reads
// them, until the host has waited for it: who does is reported, whatever code it is.
void* allocate_pinned(std::size_t nbytes);
void release_pinned(void* memory);
bool is_pinned(const void* memory);
class Unprotected {  // lets a copy that stands for a device's go on
   public:
    explicit Unprotected(const void* memory);
    ~Unprotected();
    Unprotected(const Unprotected&) = delete;

   private:
    void* block_;
};

struct Frame {
    PyCodeObject* code;
    int line;
};
using Stack = std::vector<Frame>;
Stack python_stack();

void access(const std::string& what, int stream, const void* memory, std::size_t nbytes, bool writes);

// What was found wrong so far, and no longer is remembered. Needs the GIL.
std::vector<std::string> take_reports();

}  // namespace stand_in
