"""Numbers as people read them: an amount of memory, or a duration, in the unit that fits."""

KIB = 1024
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def show_bytes(num_bytes: float) -> str:
    """An amount of memory in its largest unit, such as "1.5 GiB"."""
    if round(num_bytes) < KIB:
        return f"{num_bytes:.0f} {UNITS[0]}"
    amount = float(num_bytes)
    power = 0
    # Rounded, because 1023.99 MiB would be shown as "1024.0 MiB".
    while round(amount, 1) >= KIB and power < len(UNITS) - 1:
        amount /= KIB
        power += 1
    return f"{amount:.1f} {UNITS[power]}"


def duration(seconds: float) -> str:
    """Seconds in a unit that needs no exponent."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 2 * 60:
        return f"{seconds / 60:.3g} min"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds / 1e-3:.3g} ms"
    if seconds:
        return f"{seconds * 1e6:.3g} µs"
    return "0 s"
