"""The function that hashes a password in the database, for sign-up by SQL."""

from django.db import migrations

# PBKDF2 (RFC 8018) in SQL alone, because not every server has pgcrypto. Django's `check_password` reads its result, and
# Django replaces it by a hash of its first hasher when the user logs in.
CREATE = """\
create function signup_hash(password text) returns text language plpgsql strict as $$
declare
  rounds constant int := 100000;
  salt constant text := replace(gen_random_uuid()::text, '-', '');
  key bytea := convert_to(password, 'UTF8');
  inner_pad bytea := decode(repeat('36', 64), 'hex');
  outer_pad bytea := decode(repeat('5c', 64), 'hex');
  block bytea;
  sum bit(256);
  hash bytea := decode(repeat('00', 32), 'hex');
begin
  if length(key) > 64 then
    key := sha256(key);
  end if;
  for i in 0 .. length(key) - 1 loop
    inner_pad := set_byte(inner_pad, i, get_byte(inner_pad, i) # get_byte(key, i));
    outer_pad := set_byte(outer_pad, i, get_byte(outer_pad, i) # get_byte(key, i));
  end loop;
  block := sha256(outer_pad || sha256(inner_pad || convert_to(salt, 'UTF8') || '\\x00000001'::bytea));
  sum := ('x' || encode(block, 'hex'))::bit(256);
  for i in 2 .. rounds loop
    block := sha256(outer_pad || sha256(inner_pad || block));
    sum := sum # ('x' || encode(block, 'hex'))::bit(256);
  end loop;
  for i in 0 .. 31 loop
    hash := set_byte(hash, i, substring(sum from i * 8 + 1 for 8)::bit(8)::int);
  end loop;
  return format('pbkdf2_sha256$%s$%s$%s', rounds, salt, encode(hash, 'base64'));
end $$"""


class Migration(migrations.Migration):
    dependencies = [("signup", "0001_initial")]

    operations = [migrations.RunSQL(CREATE, "drop function signup_hash(text)")]
