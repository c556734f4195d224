"""Former names of the classes in `titanlite.observe.metrics_loggers`, for existing plugins."""

from titanlite.observe.metrics_loggers import MetricsLogger as Writer
from titanlite.observe.metrics_loggers import RunStart

__all__ = ["RunStart", "Writer"]
