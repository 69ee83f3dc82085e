"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """A mistake in a recipe, a checkpoint or an option, told in one line.

    The message names where the mistake is (recipe key, model, tensor), what was found, what was
    expected and what to do. Commands print it without a traceback and exit with a non-zero status.
    """
