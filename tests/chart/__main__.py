"""`python -m tests.chart`: write the table of values into the chart's README."""

from tests.chart.values_table import write

write()
