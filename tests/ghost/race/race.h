// The interface of the detector (core.cpp) for the wrapped CUDA functions (cuda.cpp) and the callbacks of torch (torch.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

// Kinds of memory accesses. UNKNOWN is a kernel of the compiler with unknown parameters.
enum Access : char { READ = 'R', WRITE = 'W', UNKNOWN = 'U' };

extern "C" {
int ghost_place(const void *pointer); // 0 is pageable, 1 is on the device, 2 is pinned

// Work on a stream. A kernel accesses the memory of the tensors of its operator.
void race_kernel(void *stream, const char *kernel);
void race_library_stream(void *stream); // of the next matmul or cuDNN plan of this thread
void race_library_kernel(const char *kernel);

// Work on a stream with known addresses. race_work returns the clock that race_touch needs.
int race_work(void *stream);
void race_touch(int clock, const void *start, size_t bytes, Access how, const char *what);
void race_touch_allocation(int clock, uintptr_t address, const char *what); // all of the allocation after `address`
void race_hint(uint64_t address, Access how);                               // address 0 removes all hints

// The CPU uses pinned memory.
void race_host_touch(const void *start, size_t bytes, Access how, const char *what);

// Order between streams and the CPU
void race_event_record(void *event, void *stream);
void race_event_destroy(void *event);
void race_event_wait(void *event);
int race_event_query(void *event);
void race_stream_wait_event(void *stream, void *event);
void race_stream_wait(void *stream);
int race_stream_query(void *stream);
void race_device_wait();

// Order between CPU threads: an acquire comes after all earlier releases with the same key.
void race_release(uint64_t key);
void race_acquire(uint64_t key);

// The caching allocator
void race_alloc(uint64_t start, size_t bytes, void *stream);
void race_free(uint64_t start);
void race_unmap(uint64_t start, size_t bytes);

// Operators and scopes of torch, which nest
void race_push(const char *name, bool is_operator);
void race_argument(uint64_t start, size_t bytes, Access how, bool is_on_host);
void race_pop();

void race_summary();    // writes a line with counts
uint64_t race_alarms(); // so far
uint64_t race_reuses(); // ordered reuses of memory by another stream, so far
}
