/* Counts the bytes that malloc has handed out in this process. benchmarks/planner.py compiles and preloads it. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long now, most;

static void *taken(void *block)
{
    long size = block ? (long)malloc_usable_size(block) : 0, sum = atomic_fetch_add(&now, size) + size;
    for (long seen = most; sum > seen && !atomic_compare_exchange_weak(&most, &seen, sum);)
        ;
    return block;
}

static void given_back(void *block)
{
    if (block)
        atomic_fetch_sub(&now, (long)malloc_usable_size(block));
}

void *malloc(size_t size) { return taken(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void *memalign(size_t side, size_t size) { return taken(__libc_memalign(side, size)); }
void *aligned_alloc(size_t side, size_t size) { return taken(__libc_memalign(side, size)); }
void free(void *block) { given_back(block), __libc_free(block); }

void *realloc(void *block, size_t size)
{
    given_back(block);
    void *moved = __libc_realloc(block, size);
    return taken(moved || !size ? moved : block), moved;
}

int posix_memalign(void **block, size_t side, size_t size)
{
    return (*block = taken(__libc_memalign(side, size))) ? 0 : ENOMEM;
}

long bytes_now(void) { return now; }
/* The most since the call before. */
long bytes_most(void) { return atomic_exchange(&most, now); }
