"""GPU kernels in Pallas, interpreted where there is no GPU. `lajax.ops` and two parts of
`lajax.layers` call them.

`run_*` computes the operation of that name. `supports_*` returns a sentence that says what the
kernels do not take, or None. `decode_*` computes one token, of what `supports_decode` does not
refuse. The caller of `run_*` promises:

* `lajax._shapes` has checked the arguments, and `supports_*` has returned None.
* No array is empty. Gates and states are float32; q, k, v and x have the caller's dtype.
* `document` counts the documents of a row from 0 on. Padding has the number of the document before
  it, and all its arrays are zeros. Outputs at padding are undefined: the caller replaces them.

`run_*` has first derivatives in reverse mode; `decode_*` has none. A NaN or an inf in a packed
document stays in that document (`lajax.pallas.nonfinite`).

`python -m lajax.pallas.report` compiles all kernels and writes what the compiler made of them.
"""

from lajax.pallas.attention import attention as run_attention
from lajax.pallas.attention import supports as supports_attention
from lajax.pallas.decode import supports as supports_decode
from lajax.pallas.delta_rule import decode as decode_delta_rule
from lajax.pallas.delta_rule import delta_rule as run_delta_rule
from lajax.pallas.delta_rule import supports as supports_delta_rule
from lajax.pallas.dplr import decode as decode_dplr
from lajax.pallas.dplr import delta_rule_by_channel as run_delta_rule_by_channel
from lajax.pallas.dplr import dplr as run_dplr
from lajax.pallas.dplr import supports as supports_dplr
from lajax.pallas.dplr import supports_by_channel as supports_delta_rule_by_channel
from lajax.pallas.launch import wanted
from lajax.pallas.linear_attention import decode as decode_linear_attention
from lajax.pallas.linear_attention import linear_attention as run_linear_attention
from lajax.pallas.linear_attention import supports as supports_linear_attention
from lajax.pallas.linear_recurrence import linear_recurrence as run_linear_recurrence
from lajax.pallas.linear_recurrence import supports as supports_linear_recurrence
from lajax.pallas.norm import gated_rms_norm as run_gated_rms_norm
from lajax.pallas.norm import supports as supports_gated_rms_norm
from lajax.pallas.short_conv import short_conv as run_short_conv
from lajax.pallas.short_conv import supports as supports_short_conv

__all__ = [
  "decode_delta_rule",
  "decode_dplr",
  "decode_linear_attention",
  "run_attention",
  "run_delta_rule",
  "run_delta_rule_by_channel",
  "run_dplr",
  "run_gated_rms_norm",
  "run_linear_attention",
  "run_linear_recurrence",
  "run_short_conv",
  "supports_attention",
  "supports_decode",
  "supports_delta_rule",
  "supports_delta_rule_by_channel",
  "supports_dplr",
  "supports_gated_rms_norm",
  "supports_linear_attention",
  "supports_linear_recurrence",
  "supports_short_conv",
  "wanted",
]
