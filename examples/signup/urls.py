"""The site's pages."""

from django.urls import path

from examples.signup import views

urlpatterns = [
    path("", views.page),
    path("sign-up/", views.sign_up, name="sign-up"),
    path("sign-up/orm/", views.sign_up_by_orm),
]
