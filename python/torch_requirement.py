"""The wheel's dependency, for scikit-build-core: torch of the minor version that it is built with."""

import importlib.metadata


def dynamic_metadata(field: str, settings: dict[str, object]) -> list[str]:
    if field != "dependencies" or settings:
        raise ValueError(f"torch_requirement says dependencies, and takes no settings, not {field} and {settings}")
    return [f"torch=={'.'.join(importlib.metadata.version('torch').split('.')[:2])}.*"]
