"""The users who have signed up, and the work done for them."""

from django.db import models


class User(models.Model):
    """A person who has signed up."""

    email = models.EmailField(unique=True)
    password = models.CharField(max_length=128)
    """A hash for `check_password`."""
    referrer = models.EmailField(blank=True, default="")
    checked = models.BooleanField(default=False)
    bounced = models.BooleanField(default=False)


class Workspace(models.Model):
    """A workspace. Every user gets one."""

    user = models.ForeignKey(User, on_delete=models.CASCADE)


class Step(models.Model):
    """A step that a job has done for a user. There is no unique key: the run checks that no step is doubled."""

    user = models.ForeignKey(User, on_delete=models.CASCADE)
    name = models.CharField(max_length=40)
    job_id = models.BigIntegerField()
