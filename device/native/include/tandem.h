/* Runs engines of Tandem from C and C++: no Python, no other library than the system's.
 *
 * Every function that can fail returns a status; tandem_last_error() then has the sentence, for this
 * thread. Pointers handed out belong to the object that they came from and stay valid until it is
 * closed, those of tandem_session_output until the next inference. An engine may be used by several
 * threads at once, a session by one at a time. The engine may be closed before its sessions.
 */
#ifndef TANDEM_H
#define TANDEM_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TANDEM_API __attribute__((visibility("default")))
#else
#define TANDEM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TANDEM_VERSION_MAJOR 1
#define TANDEM_VERSION_MINOR 0

typedef enum {
  TANDEM_OK = 0,
  TANDEM_ENGINE_ERROR = 1,   /* the file is no engine, is damaged, or cannot be read */
  TANDEM_SESSION_ERROR = 2,  /* it cannot run here, or what was given does not fit */
  TANDEM_ARGUMENT_ERROR = 3, /* a null pointer or an index out of range */
  TANDEM_MEMORY_ERROR = 4,
  TANDEM_INTERNAL_ERROR = 5  /* a fault of this library */
} tandem_status;

typedef enum {
  TANDEM_BOOL,
  TANDEM_INT8,
  TANDEM_UINT8,
  TANDEM_INT16,
  TANDEM_UINT16,
  TANDEM_FLOAT16,
  TANDEM_INT32,
  TANDEM_UINT32,
  TANDEM_FLOAT32,
  TANDEM_INT64,
  TANDEM_UINT64,
  TANDEM_FLOAT64
} tandem_dtype;

typedef struct tandem_engine tandem_engine;
typedef struct tandem_session tandem_session;

/* An input or output of an engine. A dimension that is not fixed is -1: `dims` then names it, or has
 * NULL where only a run tells the size. `scale`: real = scale * stored for int8, else 0. */
typedef struct {
  const char* name;
  tandem_dtype dtype;
  size_t rank;
  const int64_t* shape;
  const char* const* dims;
  double scale;
} tandem_tensor_info;

/* The sizes that a dynamic dimension may take: multiples of `step`. */
typedef struct {
  const char* name;
  int64_t min, opt, max, step;
} tandem_dim_info;

/* How a segment runs: `implementation` is "cuda", "tensorrt" or "portable", `reason` says why not another. */
typedef struct {
  const char* segment;
  const char* processor;
  const char* implementation;
  const char* reason;
} tandem_report;

/* An array on the host in C order. */
typedef struct {
  const char* name;
  tandem_dtype dtype;
  size_t rank;
  const int64_t* shape;
  void* data;
} tandem_tensor;

typedef struct {
  const char* profile;     /* of this device; NULL: any */
  int threads;             /* on the CPU, of each segment; 0: onnxruntime decides */
  const char* onnxruntime; /* its library for portable segments; NULL: libonnxruntime.so.1 */
  int portable;            /* 1: do not use the GPU */
} tandem_session_options;

TANDEM_API const char* tandem_version(void);
TANDEM_API const char* tandem_last_error(void);
TANDEM_API const char* tandem_dtype_name(tandem_dtype dtype);
TANDEM_API size_t tandem_dtype_bytes(tandem_dtype dtype);

/* Maps the file and checks all of it but the bytes of its sections, each of which is checked when it
 * is first read. */
TANDEM_API tandem_status tandem_engine_open(const char* path, tandem_engine** engine);
TANDEM_API void tandem_engine_close(tandem_engine* engine);
/* Checks every section against its checksum. A file without checksums passes. */
TANDEM_API tandem_status tandem_engine_verify(tandem_engine* engine);
TANDEM_API const char* tandem_engine_profile(const tandem_engine* engine);
TANDEM_API const char* tandem_engine_precision(const tandem_engine* engine);
/* 1: its INT8 ranges were never measured, so its results are wrong; it is good for timing only. */
TANDEM_API int tandem_engine_uncalibrated(const tandem_engine* engine);
/* The whole manifest as JSON. */
TANDEM_API const char* tandem_engine_manifest(const tandem_engine* engine);
TANDEM_API size_t tandem_engine_input_count(const tandem_engine* engine);
TANDEM_API size_t tandem_engine_output_count(const tandem_engine* engine);
TANDEM_API size_t tandem_engine_dim_count(const tandem_engine* engine);
TANDEM_API tandem_status tandem_engine_input(const tandem_engine* engine, size_t index,
                                             tandem_tensor_info* info);
TANDEM_API tandem_status tandem_engine_output(const tandem_engine* engine, size_t index,
                                              tandem_tensor_info* info);
TANDEM_API tandem_status tandem_engine_dim(const tandem_engine* engine, size_t index,
                                           tandem_dim_info* info);

/* `options` may be NULL. */
TANDEM_API tandem_status tandem_session_open(tandem_engine* engine, const tandem_session_options* options,
                                             tandem_session** session);
TANDEM_API void tandem_session_close(tandem_session* session);
TANDEM_API size_t tandem_session_report_count(const tandem_session* session);
TANDEM_API tandem_status tandem_session_report(const tandem_session* session, size_t index,
                                               tandem_report* report);

/* Runs the engine once on all its inputs, in any order. Outputs that `targets` name are written into
 * their arrays, which have the right dtype and shape; the others lie in the session's memory. */
TANDEM_API tandem_status tandem_session_infer(tandem_session* session, const tandem_tensor* inputs,
                                              size_t input_count, const tandem_tensor* targets,
                                              size_t target_count);
/* An output of the last tandem_session_infer that returned TANDEM_OK, in the engine's order. */
TANDEM_API tandem_status tandem_session_output(const tandem_session* session, size_t index,
                                               tandem_tensor* output);

/* The same on arrays in the memory of GPU 0, with a target for every output: everything is enqueued on
 * `stream` (a CUstream, or NULL), after what the caller enqueued there, and the arrays stay as they are
 * until the stream is done. Every segment runs on the GPU, else it is a session error. The primary
 * context must be current. */
TANDEM_API tandem_status tandem_session_infer_on_stream(tandem_session* session, const tandem_tensor* inputs,
                                                        size_t input_count, const tandem_tensor* targets,
                                                        size_t target_count, void* stream);

#ifdef __cplusplus
}
#endif
#endif
