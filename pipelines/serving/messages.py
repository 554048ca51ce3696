"""The messages of gRPC and of config.pbtxt, from literal tables.

Field numbers are those of the Open Inference Protocol (github.com/kserve/open-inference-protocol)
and of Triton's extensions and model configuration (github.com/triton-inference-server/common). The
messages are in a pool of their own: a client's generated code in the same process does not collide.
"""

import re
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# A message a line: fields as TYPE NAME NUMBER; `*`: repeated, `?`: a member of the message's oneof,
# `{K,V}`: a map.
MESSAGES = """
Empty:
Flag: bool live 1
Name: string name 1
NameVersion: string name 1, string version 2
ServerMetadata: string name 1, string version 2, *string extensions 3
TensorMetadata: string name 1, string datatype 2, *int64 shape 3
ModelMetadata: string name 1, *string versions 2, string platform 3, *TensorMetadata inputs 4,
  *TensorMetadata outputs 5
InferParameter: ?bool bool_param 1, ?int64 int64_param 2, ?string string_param 3,
  ?double double_param 4, ?uint64 uint64_param 5
Contents: *bool bool_contents 1, *int32 int_contents 2, *int64 int64_contents 3,
  *uint32 uint_contents 4, *uint64 uint64_contents 5, *float fp32_contents 6,
  *double fp64_contents 7, *bytes bytes_contents 8
Tensor: string name 1, string datatype 2, *int64 shape 3, {string,InferParameter} parameters 4,
  Contents contents 5
RequestedOutput: string name 1, {string,InferParameter} parameters 2
ModelInferRequest: string model_name 1, string model_version 2, string id 3,
  {string,InferParameter} parameters 4, *Tensor inputs 5, *RequestedOutput outputs 6,
  *bytes raw_input_contents 7
ModelInferResponse: string model_name 1, string model_version 2, string id 3,
  {string,InferParameter} parameters 4, *Tensor outputs 5, *bytes raw_output_contents 6
ModelStreamInferResponse: string error_message 1, ModelInferResponse infer_response 2
ModelConfigResponse: ModelConfig config 1
Duration: uint64 count 1, uint64 ns 2
InferStatistics: Duration success 1, Duration fail 2, Duration queue 3, Duration compute_input 4,
  Duration compute_infer 5, Duration compute_output 6, Duration cache_hit 7, Duration cache_miss 8
BatchStatistics: uint64 batch_size 1, Duration compute_input 2, Duration compute_infer 3,
  Duration compute_output 4
ModelStatistics: string name 1, string version 2, uint64 last_inference 3,
  uint64 inference_count 4, uint64 execution_count 5, InferStatistics inference_stats 6,
  *BatchStatistics batch_stats 7
ModelStatisticsResponse: *ModelStatistics model_stats 1
RepositoryParameter: ?bool bool_param 1, ?int64 int64_param 2, ?string string_param 3,
  ?bytes bytes_param 4
RepositoryIndexRequest: string repository_name 1, bool ready 2
ModelIndex: string name 1, string version 2, string state 3, string reason 4
RepositoryIndexResponse: *ModelIndex models 1
RepositoryModelRequest: string repository_name 1, string model_name 2,
  {string,RepositoryParameter} parameters 3
SystemRegion: string name 1, string key 2, uint64 offset 3, uint64 byte_size 4
SystemRegions: {string,SystemRegion} regions 1
CudaRegion: string name 1, uint64 device_id 2, uint64 byte_size 3
CudaRegions: {string,CudaRegion} regions 1
CudaRegister: string name 1, bytes raw_handle 2, int64 device_id 3, uint64 byte_size 4
TraceValue: *string value 1
TraceRequest: {string,TraceValue} settings 1, string model_name 2
TraceResponse: {string,TraceValue} settings 1
LogValue: ?bool bool_param 1, ?uint32 uint32_param 2, ?string string_param 3
LogSettings: {string,LogValue} settings 1

RateResource: string name 1, bool global 2, uint32 count 3
RateLimiter: *RateResource resources 1, uint32 priority 2
SecondaryDevice: SecondaryDeviceKind kind 1, int64 device_id 2
InstanceGroup: string name 1, int32 count 2, *int32 gpus 3, InstanceKind kind 4, *string profile 5,
  RateLimiter rate_limiter 6, bool passive 7, *SecondaryDevice secondary_devices 8,
  string host_policy 9
Reshape: *int64 shape 1
ModelInput: string name 1, DataType data_type 2, Format format 3, *int64 dims 4, Reshape reshape 5,
  bool is_shape_tensor 6, bool allow_ragged_batch 7, bool optional 8,
  bool is_non_linear_format_io 9
ModelOutput: string name 1, DataType data_type 2, *int64 dims 3, string label_filename 4,
  Reshape reshape 5, bool is_shape_tensor 6, bool is_non_linear_format_io 7
BatchInput: BatchInputKind kind 1, *string target_name 2, DataType data_type 3,
  *string source_input 4
BatchOutput: *string target_name 1, BatchOutputKind kind 2, *string source_input 3
Latest: uint32 num_versions 1
Specific: *int64 versions 1
VersionPolicy: ?Latest latest 1, ?Empty all 2, ?Specific specific 3
GraphLevel: int32 level 1
GraphShape: *int64 dim 1
GraphLowerBound: int32 batch_size 1, {string,GraphShape} input 2
GraphSpec: int32 batch_size 1, {string,GraphShape} input 2, GraphLowerBound graph_lower_bound 3
CudaPolicy: bool graphs 1, bool busy_wait_events 2, *GraphSpec graph_spec 3,
  bool output_copy_stream 4
Accelerator: string name 1, {string,string} parameters 2
Accelerators: *Accelerator gpu_execution_accelerator 1, *Accelerator cpu_execution_accelerator 2
PinnedMemory: bool enable 1
Optimization: GraphLevel graph 1, ModelPriority priority 2, CudaPolicy cuda 3,
  Accelerators execution_accelerators 4, PinnedMemory input_pinned_memory 5,
  PinnedMemory output_pinned_memory 6, uint32 gather_kernel_buffer_threshold 7,
  bool eager_batching 8
QueuePolicy: TimeoutAction timeout_action 1, uint64 default_timeout_microseconds 2,
  bool allow_timeout_override 3, uint32 max_queue_size 4
DynamicBatching: *int32 preferred_batch_size 1, uint64 max_queue_delay_microseconds 2,
  bool preserve_ordering 3, uint64 priority_levels 4, uint64 default_priority_level 5,
  QueuePolicy default_queue_policy 6, {uint64,QueuePolicy} priority_queue_policy 7
Control: ControlKind kind 1, *int32 int32_false_true 2, *float fp32_false_true 3,
  DataType data_type 4, *bool bool_false_true 5
ControlInput: string name 1, *Control control 2
InitialState: DataType data_type 1, *int64 dims 2, ?bool zero_data 3, ?string data_file 4,
  string name 5
State: string input_name 1, string output_name 2, DataType data_type 3, *int64 dims 4,
  *InitialState initial_state 5, bool use_same_buffer_for_input_output 6,
  bool use_growable_memory 7
Direct: uint64 max_queue_delay_microseconds 1, float minimum_slot_utilization 2
Oldest: int32 max_candidate_sequences 1, *int32 preferred_batch_size 2,
  uint64 max_queue_delay_microseconds 3, bool preserve_ordering 4
SequenceBatching: uint64 max_sequence_idle_microseconds 1, *ControlInput control_input 2,
  ?Direct direct 3, ?Oldest oldest 4, *State state 5, bool iterative_sequence 6
Step: string model_name 1, int64 model_version 2, {string,string} input_map 3,
  {string,string} output_map 4, string model_namespace 5
Ensembling: *Step step 1, uint32 max_inflight_requests 2
ModelParameter: string string_value 1
WarmupInput: DataType data_type 1, *int64 dims 2, ?bool zero_data 3, ?bool random_data 4,
  ?string input_data_file 5
Warmup: string name 1, uint32 batch_size 2, {string,WarmupInput} inputs 3, uint32 count 4
Operations: *string op_library_filename 1
TransactionPolicy: bool decoupled 1
Agent: string name 1, {string,string} parameters 2
Agents: *Agent agents 1
ResponseCache: bool enable 1
MetricIdentifier: string family 1
HistogramOptions: *double buckets 1
MetricControl: MetricIdentifier metric_identifier 1, ?HistogramOptions histogram_options 2
Metrics: *MetricControl metric_control 1
ModelConfig: string name 1, string platform 2, VersionPolicy version_policy 3,
  int32 max_batch_size 4, *ModelInput input 5, *ModelOutput output 6,
  *InstanceGroup instance_group 7, string default_model_filename 8,
  {string,string} cc_model_filenames 9, {string,string} metric_tags 10,
  ?DynamicBatching dynamic_batching 11, Optimization optimization 12,
  ?SequenceBatching sequence_batching 13, {string,ModelParameter} parameters 14,
  ?Ensembling ensemble_scheduling 15, *Warmup model_warmup 16, string backend 17,
  Operations model_operations 18, TransactionPolicy model_transaction_policy 19,
  *BatchInput batch_input 20, *BatchOutput batch_output 21, Agents model_repository_agents 23,
  ResponseCache response_cache 24, string runtime 25, Metrics model_metrics 26
"""

# Values count from 0.
ENUMS = {
    "DataType": "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8"
    " TYPE_INT16 TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16",
    "SecondaryDeviceKind": "KIND_NVDLA",
    "InstanceKind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
    "Format": "FORMAT_NONE FORMAT_NHWC FORMAT_NCHW",
    "BatchInputKind": "BATCH_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT"
    " BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO BATCH_MAX_ELEMENT_COUNT_AS_SHAPE BATCH_ITEM_SHAPE"
    " BATCH_ITEM_SHAPE_FLATTEN",
    "BatchOutputKind": "BATCH_SCATTER_WITH_INPUT_SHAPE",
    "ModelPriority": "PRIORITY_DEFAULT PRIORITY_MAX PRIORITY_MIN",
    "TimeoutAction": "REJECT DELAY",
    "ControlKind": "CONTROL_SEQUENCE_START CONTROL_SEQUENCE_READY CONTROL_SEQUENCE_END"
    " CONTROL_SEQUENCE_CORRID",
}

# Methods of the service: request and response. `Flag` has field 1 as `live` and as `ready`.
METHODS: dict[str, tuple[str, str]] = {
    "ServerLive": ("Empty", "Flag"),
    "ServerReady": ("Empty", "Flag"),
    "ModelReady": ("NameVersion", "Flag"),
    "ServerMetadata": ("Empty", "ServerMetadata"),
    "ModelMetadata": ("NameVersion", "ModelMetadata"),
    "ModelConfig": ("NameVersion", "ModelConfigResponse"),
    "ModelStatistics": ("NameVersion", "ModelStatisticsResponse"),
    "RepositoryIndex": ("RepositoryIndexRequest", "RepositoryIndexResponse"),
    "RepositoryModelLoad": ("RepositoryModelRequest", "Empty"),
    "RepositoryModelUnload": ("RepositoryModelRequest", "Empty"),
    "SystemSharedMemoryStatus": ("Name", "SystemRegions"),
    "SystemSharedMemoryRegister": ("SystemRegion", "Empty"),
    "SystemSharedMemoryUnregister": ("Name", "Empty"),
    "CudaSharedMemoryStatus": ("Name", "CudaRegions"),
    "CudaSharedMemoryRegister": ("CudaRegister", "Empty"),
    "CudaSharedMemoryUnregister": ("Name", "Empty"),
    "TraceSetting": ("TraceRequest", "TraceResponse"),
    "LogSettings": ("LogSettings", "LogSettings"),
}

_Field = descriptor_pb2.FieldDescriptorProto
_FIELD = re.compile(r"([*?]?)(?:\{(\w+),(\w+)\}|(\w+)) (\w+) (\d+)")


@cache
def message(name: str) -> Any:  # noqa: ANN401  (classes are made here)
    """Return the class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="tandem.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        # In a scope of its own: several enums have a value of the same name.
        scope = file.message_type.add(name=f"{name}Scope")
        enum = scope.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for line in re.sub(r"\n +", " ", MESSAGES.strip()).splitlines():
        if line:
            name, _, fields = line.partition(":")
            _add_fields(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call,unused-ignore]
    return pool


def _add_fields(owner: descriptor_pb2.DescriptorProto, fields: str) -> None:
    for mark, key, value, kind, name, number in _FIELD.findall(fields):
        if key:
            entry = owner.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            _add_field(entry, key, "key", 1)
            _add_field(entry, value, "value", 2)
            field = _add_field(owner, "", name, int(number))
            field.type_name = f".{PACKAGE}.{owner.name}.{entry.name}"
        else:
            field = _add_field(owner, kind, name, int(number))
        if key or mark == "*":
            field.label = _Field.LABEL_REPEATED
        if mark == "?":
            if not owner.oneof_decl:
                owner.oneof_decl.add(name="choice")
            field.oneof_index = 0


def _add_field(
    owner: descriptor_pb2.DescriptorProto, kind: str, name: str, number: int
) -> descriptor_pb2.FieldDescriptorProto:
    field = owner.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind in ENUMS:
        field.type = _Field.TYPE_ENUM
        field.type_name = f".{PACKAGE}.{kind}Scope.{kind}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    return field


_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}
