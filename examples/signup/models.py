"""Who has signed up, and what was done for them."""

from django.db import models


class User(models.Model):
    """Somebody who has signed up."""

    email = models.EmailField(unique=True)
    password = models.CharField(max_length=128)
    """A hash that `check_password` takes."""
    referrer = models.EmailField(blank=True, default="")
    checked = models.BooleanField(default=False)
    bounced = models.BooleanField(default=False)

    class Meta:
        app_label = "signup"


class Workspace(models.Model):
    """What every user gets."""

    user = models.ForeignKey(User, on_delete=models.CASCADE)

    class Meta:
        app_label = "signup"


class Step(models.Model):
    """What a job has done for a user. Nothing here keeps a step from being there twice: the run looks whether one is."""

    user = models.ForeignKey(User, on_delete=models.CASCADE)
    name = models.CharField(max_length=40)
    job_id = models.BigIntegerField()

    class Meta:
        app_label = "signup"
