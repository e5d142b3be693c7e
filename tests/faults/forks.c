/* No process for the processes that preload this, as at a limit of the kernel (ulimit -u, pids.max): until a time of the
 * monotonic clock, in ns, fork fails with EAGAIN. The file LASTSTEP_FAULTS_FORKS holds that time (64 bit), and behind it
 * the time until which threads cannot be started either.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const int64_t none[2] = {0, 0};
static const volatile int64_t *until = none;

__attribute__((constructor)) static void open_until(void) {
    const char *path = getenv("LASTSTEP_FAULTS_FORKS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) until = page;
    close(file);
}

static int refused(int what) {
    struct timespec now;
    if (!until[what]) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec < until[what];
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

pid_t fork(void) {
    static __typeof__(&fork) real;
    if (!real) real = REAL(fork);
    if (!refused(0)) return real();
    errno = EAGAIN;
    return -1;
}

/* Its caller's stack would be left twice: a fork does the same, more slowly. */
pid_t vfork(void) { return fork(); }

int posix_spawn(pid_t *restrict pid, const char *restrict path, const posix_spawn_file_actions_t *actions,
                const posix_spawnattr_t *restrict attributes, char *const argv[restrict], char *const env[restrict]) {
    static __typeof__(&posix_spawn) real;
    if (!real) real = REAL(posix_spawn);
    return refused(0) ? EAGAIN : real(pid, path, actions, attributes, argv, env);
}

int pthread_create(pthread_t *restrict thread, const pthread_attr_t *restrict attributes, void *(*start)(void *),
                   void *restrict argument) {
    static __typeof__(&pthread_create) real;
    if (!real) real = REAL(pthread_create);
    return refused(1) ? EAGAIN : real(thread, attributes, start, argument);
}
