/* A disk that misbehaves by script, for the processes that preload this.
 *
 * It stands in for the functions of the C library by which Python uses files, looks at calls that concern the folder
 * `root`, and makes one of them fail, as the file `control` in the folder LASTSTEP_WORST_DAY says (struct control below;
 * disk.py writes it). Everything else reaches the kernel untouched.
 *
 * A call is named by its role (which process of the run), the number of that process among those of its role, the
 * function, a pattern of the path (numbers, host names and random tags are replaced), and its number among such calls.
 * So the same call is found in each repetition of a run, whatever else happens in it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { ROLES = 8, RULES = 24, PATH = 1024, FILES = 4096, BLOCK = 4096 };
enum action { NONE, FAIL, FAIL_FOR, OUTAGE, STALL, DONE_BUT, SHORT, OLD, DIE, DONE_AND_DIE };

struct rule {
    int32_t fired; /* how many calls were hit */
    int32_t action, error;
    int32_t role, process, number; /* which call */
    int64_t began_ns, lasts_ns;
    char call[16], pattern[240];
};
struct control {
    int32_t processes[ROLES]; /* of each role so far */
    int32_t tracing, rules;
    char root[256];
    struct rule rule[RULES];
};

static struct control *control;
static int of_pid, role, process;
static volatile int32_t counted[RULES]; /* calls of this process that fit the rule */
static char host[128];
/* Whether an open file is below the root: 0 not known, 1 no, 2 yes. */
static volatile unsigned char ours[FILES];

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Which process of the run this is: of a rank and its supervisor, both have the rank's number in their environment, and
 * the supervisor leads the session. */
static int my_role(void) {
    const char *given = getenv("LASTSTEP_WORST_DAY_ROLE"), *rank = getenv("SUBMITIT_LOCAL_GLOBALID");
    if (!rank) rank = getenv("SLURM_PROCID");
    if (given) return atoi(given);
    if (!rank) return 0;
    return (atoi(rank) ? 3 : 1) + (getsid(0) != getpid());
}

/* Whether a disk is armed for this process. */
static int armed(void) {
    static volatile int leads;
    const char *folder = getenv("LASTSTEP_WORST_DAY");
    if (!folder) return 0;
    int pid = getpid(), is_leader = getsid(0) == pid;
    if (pid == of_pid && leads == is_leader) return 1;
    if (!control) {
        char path[PATH];
        snprintf(path, sizeof path, "%s/control", folder);
        int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
        if (file < 0) return 0;
        void *page = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        syscall(SYS_close, file);
        if (page == MAP_FAILED) return 0;
        control = page;
        gethostname(host, sizeof host - 1);
    }
    of_pid = pid, leads = is_leader, role = my_role();
    for (int i = 0; i < RULES; i++) counted[i] = 0;
    process = __sync_fetch_and_add(&control->processes[role % ROLES], 1);
    return 1;
}

/* The pattern of a path below the root; 0 if it is not below it. */
static int pattern_of(const char *path, char *out) {
    static const char hex[] = "0123456789abcdef";
    size_t length = strlen(control->root), size = 0;
    if (strncmp(path, control->root, length) || (path[length] != '/' && path[length])) return 0;
    path += length + (path[length] == '/');
    while (*path && size < 230) {
        size_t name = strlen(host);
        if (name && !strncmp(path, host, name)) {
            memcpy(out + size, "HOST", 4), size += 4, path += name;
        } else if (!strncmp(path, ".writing-step_", 14)) {
            size += sprintf(out + size, ".writing-step_#-X");
            path += strcspn(path, "/");
        } else if (*path == '.' && (strspn(path + 1, hex) == 16 || strspn(path + 1, hex) == 8)) { /* a random name */
            size += sprintf(out + size, ".X");
            path += 1 + strspn(path + 1, hex);
        } else if (*path >= '0' && *path <= '9') {
            out[size++] = '#';
            path += strspn(path, "0123456789");
        } else {
            out[size++] = *path++;
        }
    }
    out[size] = 0;
    return 1;
}

static int path_of(int file, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH - 1);
    if (length < 0) return 0;
    out[length] = 0;
    return 1;
}

static void trace(const char *call, const char *pattern) {
    char line[512], path[PATH];
    int length = snprintf(line, sizeof line, "%d %d %s %s\n", role, process, call, pattern);
    snprintf(path, sizeof path, "%s/trace", getenv("LASTSTEP_WORST_DAY"));
    int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) return;
    if (syscall(SYS_write, file, line, (size_t)length) < 0) length = 0;
    syscall(SYS_close, file);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* What a rule makes of a call. Sets errno to the error that it fails with; stalls or dies here. */
static enum action apply(struct rule *rule, volatile int32_t *count, const char *call, const char *pattern) {
    int64_t since = rule->began_ns ? now_ns() - rule->began_ns : -1;
    int lasts = since >= 0 && since < rule->lasts_ns;
    errno = rule->error;
    if (rule->action == OUTAGE && lasts) return FAIL;
    if (role != rule->role || strcmp(call, rule->call) || strcmp(pattern, rule->pattern)) return NONE;
    int first = process == rule->process && __sync_add_and_fetch(count, 1) == rule->number;
    if (first) rule->began_ns = now_ns();
    if (!first && !(rule->action == FAIL_FOR && lasts)) return NONE;
    __sync_fetch_and_add(&rule->fired, 1);
    if (rule->action == STALL) {
        struct timespec pause = {rule->lasts_ns / 1000000000, rule->lasts_ns % 1000000000};
        nanosleep(&pause, NULL);
        return NONE;
    }
    if (rule->action == DIE && strcmp(call, "write")) die(); /* a write is half done first */
    return rule->action == FAIL_FOR || rule->action == OUTAGE ? FAIL : (enum action)rule->action;
}

/* What is to become of a call. */
static enum action judge(const char *call, const char *pattern) {
    enum action found = NONE;
    if (control->tracing) trace(call, pattern);
    for (int i = 0; i < control->rules && found == NONE; i++)
        found = apply(&control->rule[i], &counted[i], call, pattern);
    return found;
}

static enum action at(int folder, const char *path, const char *call) {
    char whole[2 * PATH], pattern[256];
    int before = errno;
    if (!path || !armed()) return NONE;
    if (*path != '/') {
        char base[PATH];
        if (folder == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of(folder, base)) return NONE;
        snprintf(whole, sizeof whole, "%s/%s", base, path);
        path = whole;
    }
    enum action found = pattern_of(path, pattern) ? judge(call, pattern) : NONE;
    if (found == NONE) errno = before;
    return found;
}

static enum action of(int file, const char *call) {
    char path[PATH], pattern[256];
    int before = errno;
    enum action found = NONE;
    if (file < 0 || file >= FILES || ours[file] == 1 || !armed()) return NONE;
    if (path_of(file, path) && pattern_of(path, pattern)) {
        ours[file] = 2;
        found = judge(call, pattern);
    } else {
        ours[file] = 1;
    }
    if (found == NONE) errno = before;
    return found;
}

static int opened(int file) {
    if (file >= 0 && file < FILES) ours[file] = 0;
    return file;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Fails, or is done and fails or dies, or is done. */
#define DO(found, call) \
    enum action what = (found); \
    int error = errno; \
    if (what == FAIL) return -1; \
    __typeof__(call) result = (call); \
    if (what == DONE_AND_DIE) die(); \
    if (what == DONE_BUT) { errno = error; return -1; } \
    return result

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        DO(at(AT_FDCWD, path, flags & (O_WRONLY | O_RDWR) ? "create" : "open"), opened(real(path, flags, mode))); \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        DO(at(folder, path, flags & (O_WRONLY | O_RDWR) ? "create" : "open"), opened(real(folder, path, flags, mode))); \
    }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) { REAL(mkdir); DO(at(AT_FDCWD, path, "mkdir"), real(path, mode)); }
int mkdirat(int f, const char *path, mode_t mode) { REAL(mkdirat); DO(at(f, path, "mkdir"), real(f, path, mode)); }
int rmdir(const char *path) { REAL(rmdir); DO(at(AT_FDCWD, path, "rmdir"), real(path)); }
int unlink(const char *path) { REAL(unlink); DO(at(AT_FDCWD, path, "unlink"), real(path)); }
int unlinkat(int f, const char *path, int flags) {
    REAL(unlinkat);
    DO(at(f, path, flags & AT_REMOVEDIR ? "rmdir" : "unlink"), real(f, path, flags));
}
int rename(const char *from, const char *to) { REAL(rename); DO(at(AT_FDCWD, to, "rename"), real(from, to)); }
int renameat(int f, const char *from, int t, const char *to) {
    REAL(renameat);
    DO(at(t, to, "rename"), real(f, from, t, to));
}
int link(const char *from, const char *to) { REAL(link); DO(at(AT_FDCWD, to, "link"), real(from, to)); }
int symlink(const char *from, const char *to) { REAL(symlink); DO(at(AT_FDCWD, to, "symlink"), real(from, to)); }
int access(const char *path, int mode) { REAL(access); DO(at(AT_FDCWD, path, "stat"), real(path, mode)); }
int truncate64(const char *path, off64_t n) { REAL(truncate64); DO(at(AT_FDCWD, path, "truncate"), real(path, n)); }
int utimensat(int f, const char *path, const struct timespec times[2], int flags) {
    REAL(utimensat);
    DO(at(f, path, "utime"), real(f, path, times, flags));
}
int stat64(const char *path, struct stat64 *out) { REAL(stat64); DO(at(AT_FDCWD, path, "stat"), real(path, out)); }
int lstat64(const char *path, struct stat64 *out) { REAL(lstat64); DO(at(AT_FDCWD, path, "stat"), real(path, out)); }
int fstatat64(int f, const char *path, struct stat64 *out, int flags) {
    REAL(fstatat64);
    DO(at(f, path, "stat"), real(f, path, out, flags));
}

int fstat64(int file, struct stat64 *out) { REAL(fstat64); DO(of(file, "fstat"), real(file, out)); }
int fsync(int file) { REAL(fsync); DO(of(file, "fsync"), real(file)); }
int fdatasync(int file) { REAL(fdatasync); DO(of(file, "fsync"), real(file)); }
int ftruncate64(int file, off64_t length) { REAL(ftruncate64); DO(of(file, "truncate"), real(file, length)); }
int flock(int file, int how) { REAL(flock); DO(of(file, "flock"), real(file, how)); }
off64_t lseek64(int file, off64_t offset, int whence) { REAL(lseek64); return real(file, offset, whence); }

/* As on a network file system, where what was written may be refused at the end. The file is closed in any case. */
int close(int file) {
    REAL(close);
    int writes = file >= 0 && file < FILES && ours[file] != 1 && (fcntl(file, F_GETFL) & O_ACCMODE) != O_RDONLY;
    enum action what = writes ? of(file, "close") : NONE;
    int error = errno, result = (opened(file), real(file));
    if (what == NONE) return result;
    errno = error;
    return -1;
}

/* About half of the bytes of a read or write, at least one: whole blocks, as past the page cache nothing else may be. */
static size_t half_of(size_t size) {
    return size >= 2 * BLOCK ? size / 2 / BLOCK * BLOCK : size > 1 ? size / 2 : size;
}

ssize_t read(int file, void *data, size_t size) {
    REAL(read);
    enum action what = of(file, "read");
    if (what == FAIL || what == DONE_BUT) return -1;
    return real(file, data, what == SHORT ? half_of(size) : size);
}
ssize_t pread64(int file, void *data, size_t size, off64_t offset) {
    REAL(pread64);
    enum action what = of(file, "read");
    if (what == FAIL || what == DONE_BUT) return -1;
    return real(file, data, what == SHORT ? half_of(size) : size, offset);
}
ssize_t preadv64v2(int file, const struct iovec *data, int count, off64_t offset, int flags) {
    REAL(preadv64v2);
    enum action what = of(file, "read");
    if (what == FAIL || what == DONE_BUT) return -1;
    struct iovec half = {data->iov_base, half_of(data->iov_len)};
    return what == SHORT ? real(file, &half, 1, offset, flags) : real(file, data, count, offset, flags);
}
/* A short write is what a disk does that becomes full: it takes a part, and the next call fails. */
ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    enum action what = of(file, "write");
    if (what == FAIL || what == DONE_BUT) return -1;
    ssize_t done = real(file, data, what == SHORT || what == DIE ? half_of(size) : size);
    if (what == DIE) die();
    return done;
}

/* Listings. An old one lacks the name that changed last. */
static struct { DIR *folder; char hidden[256]; } old;

static void hide_newest(DIR *folder) {
    struct stat64 found;
    int64_t newest = -1;
    int file = dirfd(folder);
    __typeof__(&readdir64) next = (__typeof__(&readdir64))dlsym(RTLD_NEXT, "readdir64");
    __typeof__(&fstatat64) look = (__typeof__(&fstatat64))dlsym(RTLD_NEXT, "fstatat64");
    for (struct dirent64 *one; (one = next(folder));) {
        if (!strcmp(one->d_name, ".") || !strcmp(one->d_name, "..")) continue;
        if (look(file, one->d_name, &found, AT_SYMLINK_NOFOLLOW)) continue;
        int64_t changed = found.st_ctim.tv_sec * 1000000000LL + found.st_ctim.tv_nsec;
        if (changed > newest) newest = changed, strcpy(old.hidden, one->d_name);
    }
    rewinddir(folder);
    if (newest >= 0) old.folder = folder;
}

static DIR *listed(DIR *folder, enum action what) {
    if (folder && what == OLD) hide_newest(folder);
    return folder;
}
DIR *opendir(const char *path) {
    REAL(opendir);
    enum action what = at(AT_FDCWD, path, "list");
    if (what == FAIL || what == DONE_BUT) return NULL;
    return listed(real(path), what);
}
DIR *fdopendir(int file) {
    REAL(fdopendir);
    enum action what = of(file, "list");
    if (what == FAIL || what == DONE_BUT) return NULL;
    return listed(real(file), what);
}
struct dirent64 *readdir64(DIR *folder) {
    REAL(readdir64);
    struct dirent64 *found = real(folder);
    if (found && folder == old.folder && !strcmp(found->d_name, old.hidden)) found = real(folder);
    return found;
}
int closedir(DIR *folder) {
    REAL(closedir);
    int file = dirfd(folder);
    if (folder == old.folder) old.folder = NULL;
    opened(file);
    return real(folder);
}
