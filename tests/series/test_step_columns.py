"""Names of columns as steps: in their order whatever their spelling, or refused."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention.series.files.order_keys import as_clock, as_date, as_number
from kernel_attention.series.files.step_columns import channel_steps, is_step

DAY = st.dates(datetime.date(1000, 1, 1), datetime.date(9999, 12, 28))
MONTHS = [datetime.date(2000, month, 1).strftime("%B") for month in range(1, 13)]


def different(values, **limits):
    return st.lists(values, min_size=2, max_size=12, unique=True, **limits).map(sorted)


def written(values, *spellings):
    """Sorted different values, all in one of the spellings; names that differ."""
    return (
        st.tuples(different(values), st.sampled_from(spellings))
        .map(lambda drawn: [drawn[1](value) for value in drawn[0]])
        .filter(lambda names: len(set(names)) == len(names))
    )


MOMENT = st.datetimes(datetime.datetime(1000, 1, 1), datetime.datetime(9999, 12, 28))
DECIMALS = st.decimals(-1000, 1000, allow_nan=False, allow_infinity=False, places=3)
MONTH = st.tuples(st.integers(1900, 2100), st.integers(1, 12))

WHOLE = {  # what is the step alone, and never ambiguous
    "whole numbers": written(st.integers(0, 10**20), str, "{:025d}".format),
    "signed numbers": written(st.integers(-(10**20), 10**20), str, "{:+d}".format),
    "decimals": written(DECIMALS, str, "{:.3f}".format),
    "scientific": written(DECIMALS.filter(bool), "{:.6e}".format, "{:E}".format),
    "days": written(
        DAY,
        str,
        "{:%Y/%m/%d}".format,
        "{:%Y.%m.%d}".format,
        "{:%d.%m.%Y}".format,
        lambda day: f"{day.day} {MONTHS[day.month - 1][:3]} {day.year}",
        lambda day: f"{MONTHS[day.month - 1]} {day.day}, {day.year}",
        lambda day: f"{day.year}-{day.month}-{day.day}",
        lambda day: f"{day.year:04d}-{day.timetuple().tm_yday:03d}",
    ),
    "months": written(
        MONTH,
        lambda month: f"{month[0]}-{month[1]:02d}",
        lambda month: f"{month[0]}/{month[1]}",
        lambda month: f"{month[0]}_{month[1]:02d}",
        lambda month: f"{month[0]}M{month[1]:02d}",
        lambda month: f"{month[1]:02d}/{month[0]}",
        lambda month: f"{month[1]}-{month[0]}",
        lambda month: f"{MONTHS[month[1] - 1]} {month[0]}",
        lambda month: f"{MONTHS[month[1] - 1][:3]}-{month[0]}",
        lambda month: f"{month[0]} {MONTHS[month[1] - 1][:3]}",
        lambda month: f"{month[0]}{month[1]:02d}",
    ),
    "quarters": written(
        st.tuples(st.integers(1900, 2100), st.integers(1, 4)),
        lambda quarter: f"{quarter[0]}Q{quarter[1]}",
        lambda quarter: f"{quarter[0]}-Q{quarter[1]}",
        lambda quarter: f"Q{quarter[1]} {quarter[0]}",
        lambda quarter: f"Q{quarter[1]}/{quarter[0]}",
        lambda quarter: f"{quarter[1]}Q{quarter[0]}",
    ),
    "weeks": written(
        st.tuples(st.integers(1900, 2100), st.integers(1, 52)),
        lambda week: f"{week[0]}-W{week[1]:02d}",
        lambda week: f"{week[0]}W{week[1]}",
        lambda week: f"W{week[1]:02d} {week[0]}",
    ),
    "moments": written(
        MOMENT, str, lambda moment: moment.isoformat(), lambda moment: f"{moment.isoformat()}+01:00"
    ),
    "nanoseconds": written(
        st.tuples(st.datetimes(datetime.datetime(1980, 1, 1)), st.integers(0, 10**9 - 1)).map(
            lambda drawn: (drawn[0].replace(microsecond=0), drawn[1])
        ),
        lambda drawn: f"{drawn[0].isoformat()}.{drawn[1]:09d}",
        lambda drawn: f"{drawn[0].isoformat(' ')}.{drawn[1]:09d}Z",
        lambda drawn: f"{drawn[0].strftime('%Y%m%dT%H%M%S')}.{drawn[1]:09d}",
    ),
    "nanoseconds since 1970": written(st.integers(17 * 10**17, 17 * 10**17 + 3), str),
}
LAGS = {
    "signs": lambda lags: [f"t{lag:+d}" if lag else "t" for lag in lags],
    "brackets": lambda lags: [f"x(t{lag:+d})" if lag else "x(t)" for lag in lags],
    "words": lambda lags: [f"x_lag{-lag}" if lag < 0 else f"x_lead{lag}" if lag else "x" for lag in lags],
    "after a separator": lambda lags: [f"x_{lag}" for lag in lags],
}


def read(names):
    """(the columns of every channel found, ""), or (None, the reason of the refusal)."""
    try:
        return channel_steps(names, [], "f.csv"), ""
    except InputError as error:
        return None, str(error)


@pytest.mark.parametrize("style", WHOLE)
@settings(max_examples=20)
@given(data=st.data())
def test_names_that_are_steps_are_one_channel_in_the_order_of_time(style, data):
    names = data.draw(WHOLE[style])
    shuffled = data.draw(st.permutations(names))
    assert channel_steps(shuffled, [], "f.csv") == {"": names}
    assert all(map(is_step, names))


@pytest.mark.parametrize("style", WHOLE)
@settings(max_examples=20)
@given(data=st.data())
def test_the_same_names_after_those_of_channels(style, data):
    steps = data.draw(WHOLE[style])
    channels = data.draw(
        st.lists(st.sampled_from(["x", "temp", "flow rate", "v2_"]), min_size=1, unique=True)
    )
    expected = {channel: [f"{channel}_{step}" for step in steps] for channel in channels}
    names = data.draw(st.permutations([name for columns in expected.values() for name in columns]))
    assert channel_steps(names, channels, "f.csv") == expected
    found, refusal = read(names)
    assert "channel_columns" in refusal or sorted(found.values()) == sorted(expected.values())


@pytest.mark.parametrize("style", LAGS)
@given(lags=st.lists(st.integers(-9, 9), min_size=2, unique=True).map(sorted), data=st.data())
def test_lags_are_in_the_order_of_time_or_refused(style, lags, data):
    names = LAGS[style](lags)
    found, refusal = read(data.draw(st.permutations(names)))
    if found is None:
        # Without t and t+1, x-1 may have a hyphen or a sign; leads alone may be a channel.
        assert "channel_columns" in refusal
        assert (style == "signs" and max(lags) < 0) or style == "words"
    else:
        assert list(found.values()) == [names]


@given(st.data())
def test_times_of_day_are_in_their_order_or_refused(data):
    names = data.draw(
        written(
            st.times(),
            "{:%H:%M}".format,
            "{:%H:%M:%S}".format,
            str,
            "{:%I:%M %p}".format,
            lambda time: f"{time.hour % 12 or 12} {'am' if time.hour < 12 else 'pm'}",
        )
    )
    assert channel_steps(names, [], "f.csv") == {"": names}
    shuffled = data.draw(st.permutations(names))
    start = shuffled.index(names[0])
    if start and shuffled[start:] + shuffled[:start] == names:
        with pytest.raises(InputError, match="go past midnight"):
            channel_steps(shuffled, [], "f.csv")
    else:
        assert channel_steps(shuffled, [], "f.csv") == {"": names}


@given(st.lists(DAY, min_size=2, max_size=6, unique=True).map(sorted), st.sampled_from("/-"), st.booleans())
def test_days_and_months_are_told_apart_or_refused(days, gap, day_first):
    pattern = f"%d{gap}%m{gap}%Y" if day_first else f"%m{gap}%d{gap}%Y"
    names = [day.strftime(pattern) for day in days]
    found, refusal = read(names[::-1])
    if found is None:
        assert "in several ways" in refusal
        assert all(day.day <= 12 for day in days)
    else:
        assert found == {"": names}


@pytest.mark.parametrize(
    "names",
    [
        ["x_0.0", "x_0.5", "x_1.0", "x_1.5"],  # step 0.5 of x, or step 5 of x_0
        ["x-1", "x-2"],
        ["x.25", "x.5", "x.75"],
        ["01.2022", "01.2023", "02.2022"],
        ["sales_2023_01", "sales_2023_02", "sales_2024_01"],
        ["Jan23", "Feb23", "Jan24", "Feb24"],
        ["Week 1 2023", "Week 2 2023"],
        ["1/5/23", "1/6/23"],
        [],
        ["Mon 1", "Tue 1", "Mon 2", "Tue 2"],
        ["t_minus_1", "t_minus_2"],
        ["1_0", "1_1", "2_0", "2_1"],
        ["0,5", "1,0"],
        ["22:00", "23:00", "00:00", "01:00"],
        ["2023-01", "total"],
        ["2023-01", "2023-01-01"],
        ["x", "x_1", "x_2"],
        ["1", "1.0"],
    ],
)
def test_what_is_not_clear_is_refused(names):
    with pytest.raises(InputError):
        channel_steps(names, [], "f.csv")


@pytest.mark.parametrize(
    ("names", "channels", "expected"),
    [
        (["x_0.0", "x_1.0", "x_0.5"], ["x"], [["x_0.0", "x_0.5", "x_1.0"]]),
        (["x_0.0", "x_0.5", "x_1.0", "x_1.5"], ["x_1", "x_0"], [["x_1.0", "x_1.5"], ["x_0.0", "x_0.5"]]),
        (["x-2", "x-1"], ["x-"], [["x-1", "x-2"]]),
        (["x_lag1", "x_lag2", "x"], ["x"], [["x_lag2", "x_lag1", "x"]]),
        (["x_lag1", "x_lag2", "x"], ["x_lag"], [["x_lag2", "x_lag1"]]),
        (["x1_0", "x_0", "x10", "x1_1", "x_1"], ["x1"], [["x1_0", "x1_1"]]),
        (["x", "x_1", "x_0", "xylophone", "age"], ["x"], [["x_0", "x_1"]]),
        (["t_minus_2", "t_minus_1"], ["t_minus"], [["t_minus_1", "t_minus_2"]]),
        (["x_2023_02", "x_2022_03"], ["x"], [["x_2022_03", "x_2023_02"]]),
        (["1_0", "1_1", "2_0", "2_1"], ["1", "2"], [["1_0", "1_1"], ["2_0", "2_1"]]),
    ],
)
def test_named_channels_settle_what_is_not_clear(names, channels, expected):
    assert list(channel_steps(names, channels, "f.csv").values()) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["x0_1", "x0_0", "x1_0", "x1_1"], [["x0_0", "x0_1"], ["x1_0", "x1_1"]]),
        (["flag_1", "flag_0"], [["flag_0", "flag_1"]]),
        (["s1_0", "s1_1", "s2_0", "s2_1"], [["s1_0", "s1_1"], ["s2_0", "s2_1"]]),
        (["FY2024Q1", "FY2023Q4", "FY2023Q3"], [["FY2023Q3", "FY2023Q4", "FY2024Q1"]]),
        (["x.10", "x.9", "x.1"], [["x.1", "x.9", "x.10"]]),
        (["gdp1_2020", "gdp1_2019"], [["gdp1_2019", "gdp1_2020"]]),
        (["sales_2024Q1", "sales_2023Q4"], [["sales_2023Q4", "sales_2024Q1"]]),
        (["u0", "u" + "1" * 5000, "u2"], [["u0", "u2", "u" + "1" * 5000]]),
        (["\N{MINUS SIGN}1", "\N{MINUS SIGN}2"], [["\N{MINUS SIGN}2", "\N{MINUS SIGN}1"]]),
    ],
)
def test_names_that_could_be_taken_for_others(names, expected):
    assert list(channel_steps(names, [], "f.csv").values()) == expected


def test_messages_are_short():
    names = [f"x{'1' * 5000}", f"x0{'1' * 5000}"]
    with pytest.raises(InputError, match="have the same number or time") as caught:
        channel_steps(names, [], "f.csv")
    assert len(str(caught.value)) < 300


def test_keys_have_all_digits():
    assert as_number("0.1") == Decimal("0.1")
    assert as_number("1711846200000000001") - as_number("1711846200000000000") == 1
    assert as_date("2024-03-31T00:00:00.0000000000001") > as_date("2024-03-31T00:00:00")
    assert (
        as_date("2024-03-31T12:00+02:00") == as_date("2024-03-31 10:00Z") == as_date("31.03.2024 10:00 UTC")
    )
    assert as_clock("12 am") < as_clock("12:30 AM") < as_clock("9:15") < as_clock("12 pm")


@pytest.mark.parametrize(
    "text", ["", "1_0", "nan", "inf", "x", "2023-13", "31/31/2023", "2023Q5", "2023-366", "25:00 pm", "12:60"]
)
def test_other_texts_are_no_keys(text):
    readers = (as_number, as_date, lambda text: as_date(text, day_first=False), as_clock)
    assert [read(text) for read in readers] == [None] * 4
