"""A calibration file of ROS 2 (`camera_calibration` writes it) as sensor_msgs/CameraInfo."""

from typing import Annotated

import msgspec
from msgspec import Meta

from device.errors import PipelineError
from device.toml_file import user_path
from pipelines.ros2.cdr import Message
from pipelines.sinks.ros2_messages import Pinhole


class Matrix(msgspec.Struct, frozen=True):
    """Numbers row by row."""

    rows: int
    cols: int
    data: tuple[float, ...]


class Matrix3x3(msgspec.Struct, frozen=True):
    """Nine numbers row by row."""

    data: Annotated[tuple[float, ...], Meta(min_length=9, max_length=9)]


class Matrix3x4(msgspec.Struct, frozen=True):
    """Twelve numbers row by row."""

    data: Annotated[tuple[float, ...], Meta(min_length=12, max_length=12)]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the file that are read; it has others."""

    image_width: Annotated[int, Meta(ge=1)]
    image_height: Annotated[int, Meta(ge=1)]
    distortion_model: str
    camera_matrix: Matrix3x3
    distortion_coefficients: Matrix
    rectification_matrix: Matrix3x3
    projection_matrix: Matrix3x4

    @property
    def pinhole(self) -> Pinhole:
        """Focal lengths and principal point."""
        fx, _, cx, _, fy, cy, *_ = self.camera_matrix.data
        return Pinhole(fx, fy, cx, cy)

    def scaled_to(self, width: int, height: int) -> "Calibration":
        """Return the calibration of the same picture in another size, in pixels."""
        x, y = width / self.image_width, height / self.image_height
        if x == y == 1.0:
            return self
        k, p = self.camera_matrix.data, self.projection_matrix.data
        return msgspec.structs.replace(
            self,
            image_width=width,
            image_height=height,
            camera_matrix=Matrix3x3(_rows_times((x, y, 1.0), k)),
            projection_matrix=Matrix3x4(_rows_times((x, y, 1.0), p)),
        )

    def message(self, header: Message) -> Message:
        """Return CameraInfo."""
        return {
            "header": header,
            "height": self.image_height,
            "width": self.image_width,
            "distortion_model": self.distortion_model,
            "d": self.distortion_coefficients.data,
            "k": self.camera_matrix.data,
            "r": self.rectification_matrix.data,
            "p": self.projection_matrix.data,
        }


def _rows_times(factors: tuple[float, ...], data: tuple[float, ...]) -> tuple[float, ...]:
    columns = len(data) // len(factors)
    return tuple(value * factors[index // columns] for index, value in enumerate(data))


def read_calibration(path: str) -> Calibration:
    """Read a file; PipelineError: it is missing, or no calibration."""
    try:
        calibration = msgspec.yaml.decode(user_path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise PipelineError(
            f"camera_info {path} cannot be read ({error.strerror}): correct the path."
        ) from error
    except ImportError as error:
        raise PipelineError(
            "camera_info needs the package PyYAML: pip install 'tandem-edge[ros2]'."
        ) from error
    except msgspec.DecodeError as error:
        raise PipelineError(
            f"camera_info {path} is no calibration of ROS 2 ({error}): give the file that"
            " camera_calibration has written."
        ) from error
    if not all(calibration.camera_matrix.data[i] > 0 for i in (0, 4)):
        raise PipelineError(
            f"camera_info {path} has a focal length of 0: calibrate the camera first."
        )
    return calibration
