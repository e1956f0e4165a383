"""The linear memory in its normal form: the recurrence that defines it, and the forms that compute it."""
