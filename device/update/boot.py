"""The state from which an agent starts: what was interrupted is decided, what runs is whole."""

import logging

import msgspec

from device.errors import BundleError, BundleReadError, StateError
from device.update import slots
from device.update.slot_store import SlotStore
from device.update.slots import SlotState

LOG = logging.getLogger("tandem.agent")


def boot_state(store: SlotStore, at: str = "") -> tuple[SlotState, bool]:
    """Return the state to start from, and whether the disk has it.

    A trial that was interrupted is counted on the disk before it goes on, or rolled back. One that
    cannot be counted or read is postponed, and one whose files are damaged is fetched again: the
    release is not to blame. The slot that runs (the one on trial, else the active one) is whole, as
    far as the disk gives it. `at`: the time, for the records.
    """
    loaded = store.load()
    store.clean()
    state = slots.interrupted(loaded, at)
    trial = state.trial
    if trial is not None:
        try:
            state = store.save(state)  # an attempt that is not counted could go on for ever
            store.verify(trial)
            return state, True
        except (StateError, BundleReadError) as error:
            LOG.error("%s", error)
            state = slots.postpone(state, str(error))
        except BundleError as error:
            LOG.error("%s", error)
            state = slots.clear(slots.postpone(state, str(error)))
    elif loaded.trial is not None and state.failure is not None:
        LOG.error("%s", state.failure.reason)
    state = with_whole_active(store, state)
    if state == loaded:
        return state, True
    try:
        return store.save(state), True
    except StateError as error:
        LOG.error("%s", error)
        return state, False


def with_whole_active(store: SlotStore, state: SlotState) -> SlotState:
    """Give up an active slot that is damaged for the idle one, if that was good and is whole.

    One that the disk does not give is kept: what it holds is not known to be damaged.
    """
    while state.active is not None:
        try:
            store.verify(state.active)
        except BundleReadError as error:
            LOG.error("%s", error)
            return state
        except BundleError as error:
            LOG.error("%s", error)
            state = msgspec.structs.replace(slots.lose_active(state), recovery=str(error))
        else:
            return state
    return state
