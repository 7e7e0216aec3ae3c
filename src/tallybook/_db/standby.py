"""How far a hot standby is behind its primary, for its readers."""

from dataclasses import dataclass

# While a receiver runs and has replayed everything but the newest page, the lag is zero: a record or two are being
# replayed. Otherwise only the age of the last replayed transaction is known; for an idle primary that is old.
LAG = """\
pg_is_in_recovery(), exists (select from pg_stat_wal_receiver),
case when not pg_is_in_recovery() then 0
     when exists (select from pg_stat_wal_receiver) and not pg_is_wal_replay_paused()
      and pg_wal_lsn_diff(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) < 8192 then 0
     else extract(epoch from clock_timestamp() - pg_last_xact_replay_timestamp()) end::float8"""
"""Columns of a select: the values of a Standby."""
BEHIND = 10.0  # seconds from which on the lag is worth a warning


@dataclass(frozen=True, slots=True)
class Standby:
    """A server that is used for reads instead of the primary."""

    in_recovery: bool  # False: it is a primary
    receives: bool  # whether it is connected to its primary
    lag: float | None  # seconds; None: it has replayed nothing yet

    @property
    def is_behind(self) -> bool:
        """Whether its data may be old."""
        return self.in_recovery and (not self.receives or self.lag is None or self.lag >= BEHIND)

    def __str__(self) -> str:
        if not self.in_recovery:
            return "read from a primary: no standby is at this address"
        how = "by an unknown time" if self.lag is None else f"{self.lag:.1f} s"
        cut_off = "" if self.receives else ", which receives nothing from its primary"
        return f"read from a standby, {how} behind{cut_off}"
