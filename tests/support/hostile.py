"""Values that fight back."""

from typing import Any


def hostile(base: type, **raises: type[BaseException]) -> Any:
    """Return a subclass of `base` whose methods and attributes of these names raise these errors."""

    def raising(name: str, error: type[BaseException]) -> Any:
        def fail(*args: Any) -> Any:
            raise error

        return fail if callable(getattr(base, name, None)) else property(fail)

    return type("Hostile", (base,), {name: raising(name, error) for name, error in raises.items()})
