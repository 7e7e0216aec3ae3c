"""python -m examples.signup.manage migrate | tallybook worker | ...: with TALLYBOOK_DSN, MAIL_URL, SIGNUP_RELEASE."""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "examples.signup.settings")
    execute_from_command_line(sys.argv)
