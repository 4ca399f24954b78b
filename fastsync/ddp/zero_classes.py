"""Classes that stand in for FastDDP where `zero` asks for another way of wrapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from fastsync._torch import Front
from fastsync.config.arguments import Zero

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StagedDDP"]


class StagedDDP(Front):
    """A front whose constructor makes an object of the subclass that `zero` asks for.

    A subclass says so when it is defined: `class Sharded(FastDDP, zero=3)`.
    """

    _by_stage: ClassVar[dict[int, type[StagedDDP]]] = {}
    _stage: ClassVar[int | None] = None

    def __init_subclass__(cls, zero: int | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if zero is not None:
            cls._stage = zero
            StagedDDP._by_stage[zero] = cls

    @classmethod
    def class_for(cls, zero: object) -> type[Self]:
        """Return the class of the models of a stage: this one, or the subclass made for it."""
        return cast("type[Self]", StagedDDP._by_stage.get(_stage_of(zero), cls))

    def __new__(cls, *args: object, **kwargs: Any) -> Self:
        stage = _stage_of(kwargs.get("zero", 0))
        wanted = StagedDDP._by_stage.get(stage)
        if wanted is None or issubclass(cls, wanted):
            return super().__new__(cls)
        if cls not in wanted.__mro__:
            raise ValueError(
                f"zero={stage} makes a model of another class than {cls.__name__}: call "
                "fastsync.FastDDP itself"
            )
        return cast("Self", super().__new__(wanted))


def _stage_of(zero: object) -> int:
    """Return the stage that the argument `zero` names, or is."""
    return cast(int, zero.stage if isinstance(zero, Zero) else zero)
