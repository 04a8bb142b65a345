"""The fence of a round: one integer that is above the fences of all earlier rounds."""

# A worker that was cut off does not know that a newer round exists. Whatever stores its work can tell: it compares fences.
#
# No function of era and number will do. A server that restarts empty may be told of a round by one member, and its
# successor by another one that never heard of what the first server sealed. Both seal a round of the same level and
# number, and ids are not ordered by time. What does order them is the order in which servers start at one place.
#
# On an engine whose revisions never begin again (etcd), the revision of the listing that the seal was decided on is a
# fence: it is the same for all members, and grows with every head write. Elsewhere a fence is `life * LIFE + count`:
#
#     life   begins with a head that is made anew, or restored from another place: above all lives that members know of,
#            and not below the wall clock of the leader, in seconds since 2020
#     count  grows with each seal, and begins above the floor that the server told the leader when it came. Floors only
#            grow at one place: 64 for each second since the machine was booted, and the place names the boot. A floor for
#            each start would not do: a server forgets a run some time after it was closed, and may be told of it again by
#            a member that never heard of its last rounds (seed 30000082).
#
# A clock enters as a number that is large enough. No rule reads a fence, so nothing is decided by a clock (G10).

from __future__ import annotations

from .view import View

LIFE = 1 << 32


def first_fence(view: View) -> int:
    """T2.5: the fence of a head that is made anew."""
    return 0 if view.fence_floor is None else _new_life(view, _told(view)[0])


def restored_fence(view: View) -> int:
    """T14.4: the fence of a head that is made from reports."""
    told, place = _told(view)
    if view.fence_floor is None or (view.fence_floor and place == view.place):
        return told
    return _new_life(view, told)


def next_fence(view: View) -> int:
    """T6.14: the fence of the round that is sealed now."""
    assert view.head is not None, "asked when sealing"
    known = max(view.head.fence, _told(view)[0])
    if view.fence_floor is None:
        return max(view.revision, known + 1)
    return max(known, view.head.fence // LIFE * LIFE + view.fence_floor) + 1


def _told(view: View) -> tuple[int, str]:
    """The highest fence that a live member knows of, and the place of its engine."""
    return max(((live.record.fence, live.record.fence_place) for live in view.members.values()), default=(0, ""))


def _new_life(view: View, told: int) -> int:
    return max(told // LIFE + 1 if told else 0, view.wall_s) * LIFE
