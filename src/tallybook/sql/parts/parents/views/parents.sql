-- parents: which jobs wait for which others, and how those were seen to have ended. A look-up by child, or of the open
-- ones by parent, is by index.
-- The rows of a child go when it comes into line, or is cancelled.
-- rights: operator
create or replace view tallybook.parents as
select p.child_id, p.parent_id, p.place, p.ended_as from tallybook.parent p;
comment on view tallybook.parents is
  'Which jobs wait for which others to end. ended_as is null while the parent has not.';
