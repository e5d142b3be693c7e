/* The wall clock, moved by what the file LASTSTEP_FAULTS_CLOCK holds (a 64-bit number of seconds), for the processes
 * that preload this: a step of the clock that the rest of the machine does not see. On the node N of a cluster it is the
 * file LASTSTEP_FAULTS_CLOCK.N, if there is one.
 *
 * Whoever waits until a time of the wall clock names one of the moved clock, which the kernel does not know, so such
 * deadlines are moved back.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none = 0;
static const volatile int64_t *offset = &none;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("LASTSTEP_FAULTS_CLOCK"), *node = getenv("SLURMD_NODENAME");
    char own[4096];
    int file = -1;
    if (path && node && snprintf(own, sizeof own, "%s.%s", path, node) < (int)sizeof own)
        file = open(own, O_RDONLY | O_CLOEXEC);
    if (path && file < 0) file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
    close(file);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int status = real(clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static __typeof__(&gettimeofday) real;
    if (!real) real = REAL(gettimeofday);
    int status = real(now, zone);
    if (!status) now->tv_sec += *offset;
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

/* Of the monotonic clock, which starts at 0 with the machine, deadlines are left as they are. */
static struct timespec real_deadline(const struct timespec *deadline) {
    struct timespec moved = *deadline;
    if (moved.tv_sec > 1000000000) moved.tv_sec -= *offset;
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict d) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) real = REAL(pthread_cond_timedwait);
    struct timespec moved = real_deadline(d);
    return real(c, m, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict d) {
    static __typeof__(&pthread_mutex_timedlock) real;
    if (!real) real = REAL(pthread_mutex_timedlock);
    struct timespec moved = real_deadline(d);
    return real(m, &moved);
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict d) {
    static __typeof__(&sem_timedwait) real;
    if (!real) real = REAL(sem_timedwait);
    struct timespec moved = real_deadline(d);
    return real(s, &moved);
}
