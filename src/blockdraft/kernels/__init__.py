"""What computes: one interface, a reference on torch's operations, and faster backends behind it.

`interface` says what a backend offers, with `weights` and `recurrence_interface` for what it is
given; `backends` says which one computes for a precision and a device.
`torch` is the reference; `cpu` has packed weights, and native code where it can be compiled; `cuda`
has Triton kernels. Only this package knows the backends by name.
"""
