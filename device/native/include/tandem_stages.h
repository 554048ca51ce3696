/* Stages of a pipeline on arrays of the caller. Each gives the same bits as the Python that it stands for
 * (pipelines/stages), which remains the reference.
 *
 * A function that returns a negative number has written nothing that counts: its arguments are beyond what
 * it computes (a value that is not finite, too many candidates, no memory), and the reference has to do it.
 * Nothing is kept between calls. Arrays are in C order.
 */
#ifndef TANDEM_STAGES_H
#define TANDEM_STAGES_H

#include "tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counts changes of these functions and of their results; callers want the one that they know. */
#define TANDEM_STAGES_VERSION 1
TANDEM_API int tandem_stages_version(void);

/* Bytes of three interleaved channels to planes of float32: value * factor - shift. The planes follow each
 * other in the order of the channels, or from the last one if `reversed`. Strides: pixels' in bytes, planes'
 * in elements. `factors` and `shifts` are in the order of the planes. */
typedef struct {
  const uint8_t* pixels;
  float* planes;
  float factors[3], shifts[3];
  size_t rows, columns, pixel_stride, row_stride, plane_stride;
  int reversed;
} tandem_planes_call;
TANDEM_API void tandem_stages_planes(const tandem_planes_call* call);

/* The same of NV12, which is never stored as blue, green and red: `pixels` is the luma plane, `chroma` the other
 * one, whose rows have the same stride. Blue, green and red, 0 to 255, are those that OpenCV's
 * COLOR_YUV2BGR_NV12 gives. */
TANDEM_API void tandem_stages_planes_nv12(const tandem_planes_call* call, const uint8_t* chroma);

/* The boxes of a YOLO head, float32 [4 + classes + any, cells]: centre x, centre y, width and height in
 * pixels of the network input, then the scores. The best class of each cell from `score_threshold` on,
 * suppression per class by `max_iou` (below 0: none), at most `max_detections`; then to the frame, cut
 * there, without those that have no area. Best first. `boxes` and `input_boxes` [max_detections, 4] (x1, y1,
 * x2, y2 in pixels of the frame and of the input), `scores`, `class_ids` and `places` (the cells). */
typedef struct {
  const float* head;
  size_t classes, cells, max_detections;
  float score_threshold, max_iou;
  float scale_x, scale_y, pad_x, pad_y, frame_width, frame_height;
  float *boxes, *input_boxes, *scores;
  int64_t *class_ids, *places;
} tandem_decode_call;
/* Returns how many there are. */
TANDEM_API int64_t tandem_stages_decode(const tandem_decode_call* call);

/* The tracks of one camera, changed in place: `count` of them, room for `capacity`, which is at least
 * `count` and the detections together. `states` [5, capacity, 4]: centre x, centre y, width and height by
 * position, velocity, variance of the position, covariance, variance of the velocity. `status`: 0 new, 1 seen,
 * 2 lost; `at_s`: of the last frame; `next_id`: the number of the next track. */
typedef struct {
  double* states;
  int64_t *ids, *class_ids, *hits;
  float* scores;
  int8_t* status;
  double* seen_s;
  size_t count, capacity;
  double at_s;
  int64_t next_id;
} tandem_tracks;

typedef struct {
  float high_score, low_score, start_score, iou;
  double lost_s;
  int64_t confirm_frames;
  int same_class;
} tandem_tracker;

/* One frame of ByteTrack. `boxes` float32 [count, 4], x1, y1, x2, y2; writes the number of the track of each
 * detection to `ids` (-1: none) and whether it stays to `stays`; returns how many stay. */
TANDEM_API int64_t tandem_stages_track(tandem_tracks* tracks, const tandem_tracker* config, const float* boxes,
                                       const float* scores, const int64_t* class_ids, size_t count,
                                       double time_s, int64_t* ids, uint8_t* stays);

/* A frame in one call: `tandem_stages_decode`, then `tandem_stages_track` of what it gives. Writes those detections
 * alone that stay, and the number of the track of each to `ids` [max_detections]; to `decoded_ns`, when decoding ended
 * (CLOCK_MONOTONIC); returns how many they are. A negative number: the tracks are as before, the other arrays are
 * not. Room for `count` + `max_detections` tracks always suffices. */
TANDEM_API int64_t tandem_stages_follow(const tandem_decode_call* call, tandem_tracks* tracks,
                                        const tandem_tracker* config, double time_s, int64_t* ids,
                                        int64_t* decoded_ns);

#ifdef __cplusplus
}
#endif
#endif
